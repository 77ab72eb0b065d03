#include "tessera/wrappers/detail/pass_follower.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "tessera/core/error.h"

namespace tessera::wrappers {

using program::Instruction;
using program::Op;
using program::Phase;
using program::Program;

namespace {

constexpr int64_t kKinds = 3;

PassFollower::Kind kind_of(int64_t tag) {
  return static_cast<PassFollower::Kind>(tag % kKinds);
}

}  // namespace

PassFollower::PassFollower(parallel::data::ShardedParameters& parameters,
                           std::vector<std::string> names,
                           std::vector<int64_t> stages,
                           std::function<void(Part, bool)> enter,
                           std::function<void()> on_backward,
                           std::function<void(const at::Tensor&)> on_gradient)
    : parameters_(parameters),
      names_(std::move(names)),
      stages_(std::move(stages)),
      enter_(std::move(enter)),
      on_backward_(std::move(on_backward)),
      on_gradient_(std::move(on_gradient)),
      gathered_(names_.size()),
      under_way_(names_.size()),
      allocated_(names_.size()) {}

void PassFollower::set_programs(PassPrograms programs) {
  programs_ = std::move(programs);
}

const Program& PassFollower::program() const {
  static const Program none;
  switch (part_) {
    case Part::kForward:
      return programs_.forward;
    case Part::kEvaluation:
      return programs_.evaluation;
    case Part::kBackward:
      return programs_.backward;
    case Part::kNone:
      break;
  }
  return none;
}

void PassFollower::begin(Part part) {
  enter_(part, /*again=*/false);
  if (part != Part::kBackward) visits_.clear();
  enter(part);
}

void PassFollower::enter(Part part) {
  part_ = part;
  position_ = 0;
  hold(part == Part::kBackward ? programs_.held
                               : std::vector<bool>(names_.size()));
}

void PassFollower::repeat(Part part) {
  enter(part);
  finish();
}

void PassFollower::finish() {
  run(program(), position_, program().size());
  // Whole ones are stale behind the update that may follow.
  if (part_ != Part::kForward) free_all();
  part_ = Part::kNone;
}

void PassFollower::complete() {
  run(programs_.completion, 0, programs_.completion.size());
}

void PassFollower::hold(const std::vector<bool>& owners) {
  const Unheard unheard;
  for (size_t owner = 0; owner < owners.size(); ++owner) {
    const auto unit = static_cast<int64_t>(owner);
    if (under_way_[owner]) await({Op::kGatherParameters, -1, unit});
    if (gathered_[owner] && !owners[owner]) free_parameters(unit);
    if (gathered_[owner] || !owners[owner]) continue;
    begin({Op::kGatherParameters, -1, unit}, /*awaited_next=*/true);
    await({Op::kGatherParameters, -1, unit});
  }
}

void PassFollower::gather_all() {
  hold(std::vector<bool>(names_.size(), true));
}

void PassFollower::free_all() { hold(std::vector<bool>(names_.size())); }

int64_t PassFollower::tag_of(int64_t owner, Kind kind) {
  return kKinds * owner + static_cast<int64_t>(kind);
}

void PassFollower::on_use(int64_t tag, const at::Tensor& tensor) {
  const int64_t owner = tag / kKinds;
  const bool goes_back = torch::autograd::get_current_graph_task_id() != -1;
  if (goes_back && part_ != Part::kBackward) on_backward_();
  if (kind_of(tag) == Kind::kGradients) return on_gradient(owner, tensor);
  if (owner > 0 && !goes_back && (visits_.empty() || visits_.back() != owner)) {
    visits_.push_back(owner);
  }
  if (stages_[owner] == 0 || gathered_[owner]) return;
  TS_CHECK(part_ != Part::kNone, "fully_shard: parameters of ", name(owner),
           " are used outside of forward() and backward, where this rank has "
           "a shard of them alone. Compute with them in forward(), or while "
           "what gather() gives you lives. An optimizer that was made before "
           "fully_shard() has whole parameters: make it afterwards, of the "
           "module's parameters(), which are shards then.");
  advance(Op::kGatherParameters, Phase::kAwait, owner);
}

void PassFollower::on_write(int64_t tag, const std::string& op) {
  const bool is_lost = kind_of(tag) == Kind::kCopies &&
                       (part_ == Part::kForward || part_ == Part::kEvaluation);
  TS_CHECK(!is_lost, "fully_shard: forward() writes to a parameter of ",
           name(tag / kKinds), " (", op,
           "), whose whole values are made of shards that lie elsewhere, in "
           "zero_stage 3 and with compute_dtype: that is lost. Use a lower "
           "zero_stage without compute_dtype, or write while what gather() "
           "gives you lives.");
}

void PassFollower::on_gradient(int64_t owner, const at::Tensor& gradient) {
  TS_CHECK(part_ == Part::kBackward, "fully_shard: the whole gradients of ",
           name(owner),
           " are used outside of backward: an optimizer that was made before "
           "fully_shard() has whole parameters. Make it afterwards, of the "
           "module's parameters(), which are shards then.");
  on_gradient_(gradient);
  if (stages_[owner] < 2 || allocated_[owner]) return;
  advance(Op::kAllocateGradients, Phase::kWhole, owner);
}

void PassFollower::advance(Op op, Phase phase, int64_t owner) {
  if (try_advance(op, phase, owner)) return;
  const Part part = part_;
  finish();
  enter_(part, /*again=*/true);
  enter(part);
  const bool found = try_advance(op, phase, owner) || gathered_[owner];
  TORCH_INTERNAL_ASSERT(found, "fully_shard: no part has ", name(owner));
}

bool PassFollower::try_advance(Op op, Phase phase, int64_t owner) {
  for (size_t i = position_; i < program().size(); ++i) {
    const Instruction& each = program()[i];
    if (each.op != op || each.phase != phase || each.unit != owner) continue;
    run(program(), position_, i + 1);
    return true;
  }
  return false;
}

void PassFollower::run(const Program& program, size_t first, size_t last) {
  const Unheard unheard;
  const at::NoGradGuard no_grad;
  position_ = last;  // also where an instruction throws
  program::execute(program, first, last, *this);
}

std::string PassFollower::name(int64_t owner) const {
  return names_[owner].empty() ? "the module itself"
                               : "\"" + names_[owner] + "\"";
}

void PassFollower::begin(const Instruction& instruction, bool awaited_next) {
  const auto mode = awaited_next ? comm::Mode::kBlocking : comm::Mode::kAsync;
  const int64_t owner = instruction.unit;
  switch (instruction.op) {
    case Op::kGatherParameters:
      under_way_[owner] = true;
      return parameters_.begin_gather(owner, mode);
    case Op::kReduceGradients:
      allocated_[owner] = false;
      return parameters_.begin_reduction(owner, mode);
    case Op::kSumGradients:
      return parameters_.begin_sum(owner, mode);
    default:
      TORCH_INTERNAL_ASSERT(false, "this program has no ",
                            program::name_of(instruction.op));
  }
}

void PassFollower::await(const Instruction& instruction) {
  const int64_t owner = instruction.unit;
  switch (instruction.op) {
    case Op::kGatherParameters:
      parameters_.await_gather(owner);
      under_way_[owner] = false;
      gathered_[owner] = true;
      return;
    case Op::kReduceGradients:
      return parameters_.await_reduction(owner);
    case Op::kSumGradients:
      return parameters_.await_sum(owner);
    default:
      TORCH_INTERNAL_ASSERT(false, "this program has no ",
                            program::name_of(instruction.op));
  }
}

void PassFollower::free_parameters(int64_t owner) {
  parameters_.free(owner);
  gathered_[owner] = false;
}

void PassFollower::allocate_gradients(int64_t owner) {
  parameters_.allocate_gradients(owner);
  allocated_[owner] = true;
}

}  // namespace tessera::wrappers
