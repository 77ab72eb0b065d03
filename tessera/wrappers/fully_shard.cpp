#include "tessera/wrappers/fully_shard.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/core/memory_kind.h"
#include "tessera/optim/gradient_norm.h"
#include "tessera/parallel/data/zero_config.h"
#include "tessera/wrappers/detail/agreement.h"
#include "tessera/wrappers/detail/backward.h"
#include "tessera/wrappers/detail/clip.h"
#include "tessera/wrappers/detail/module_shards.h"
#include "tessera/wrappers/detail/pass_follower.h"
#include "tessera/wrappers/detail/same_parameters.h"
#include "tessera/wrappers/sync_batch_norm.h"

namespace tessera::wrappers {

using mesh::Axis;

namespace {

FullyShardOptions with_prefetch(FullyShardOptions options,
                                const comm::Communicator& ranks) {
  TS_CHECK_CONFIG(options.prefetch >= -1, "fully_shard: prefetch is ",
                  options.prefetch,
                  "; it counts units, and -1 stands for the default.");
  parallel::data::ZeroConfig zero;
  zero.prefetch = options.prefetch;
  options.prefetch = zero.resolved(ranks.backend() == "shm").prefetch;
  return options;
}

}  // namespace

struct FullyShardedCore::Impl {
  Impl(torch::nn::Module& of, const mesh::DeviceMesh& on,
       comm::Communicator& ranks, const FullyShardOptions& asked);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void set_programs(const std::vector<int64_t>& visits);
  Agreed agree(Act mine);
  void enter(Part part, bool again);
  void begin_forward(Part part);
  void share_buffers();
  void adopt_order();
  void begin_backward();
  void end_backward(Act end);
  void ended_backward(const Agreed& agreed);
  void run_backward(const std::vector<at::Tensor>& from,
                    const std::vector<at::Tensor>& gradients, Act end);
  void begin_gradients();
  void publish_gradients(int64_t active);
  void follow_module();
  void note_graph();
  void require_members();
  void take_back(const std::vector<at::Tensor>& masters,
                 const std::vector<at::Tensor>& shown,
                 const std::vector<at::Tensor>& windows);
  std::vector<bool> touched_anywhere();
  std::vector<at::Tensor> gradients(bool counted) const;
  at::Tensor sum_of_squares() const;
  double clip(double most);
  void take_part(const Agreed& agreed);
  // The i-th that is trained.
  at::Tensor shard(size_t i) const { return held.shards()[held.trained()[i]]; }

  torch::nn::Module& module;
  const mesh::DeviceMesh mesh;
  const FullyShardOptions options;
  comm::Group& world;
  comm::Group& group;  // of the ranks that see other data
  ModuleShards held;
  PassFollower follower;
  HeardMemory memory;
  bool order_is_known = false;
  bool is_gathered = false;      // by gather()
  bool goes_back = false;        // a backward is under way
  bool ends_by_itself = true;    // loss.backward(): by a callback
  bool accumulates = false;      // gradients of micro-batches wait
  bool stands_by = false;        // takes part in what others do
  int64_t buffers_root = 0;      // of `group`: the first that has data
  std::vector<at::Tensor> kept;  // by trained: gradients of before
  std::vector<bool> touched;     // by trained: a gradient came
  // By trained: something that is still to be gone back through was computed
  // with the shard before this forward.
  std::vector<bool> in_graph;
  size_t num_parameters;  // of the module
  std::string refusal;    // of what was done to whole parameters
};

FullyShardedCore::Impl::Impl(torch::nn::Module& of, const mesh::DeviceMesh& on,
                             comm::Communicator& ranks,
                             const FullyShardOptions& asked)
    : module(of),
      mesh(on),
      options(with_prefetch(asked, ranks)),
      world(ranks.world()),
      group(*ranks.make_group(
          mesh.peers(ranks.rank(), {Axis::kDpReplicate, Axis::kDpShard}),
          "data")),
      held(module, mesh, ranks, group, options),
      follower(
          held.parameters(), held.names(), held.stages(),
          [this](Part part, bool again) { enter(part, again); },
          [this] { begin_backward(); },
          [this](const at::Tensor& gradient) {
            if (const auto which = held.whose_gradient(gradient)) {
              touched[*which] = true;
            }
          }),
      memory(follower),
      kept(held.trained().size()),
      touched(held.trained().size()),
      in_graph(held.trained().size()),
      num_parameters(module.parameters().size()) {
  held.hear(memory);
  std::vector<int64_t> visits(held.names().size() - 1);
  std::iota(visits.begin(), visits.end(), 1);
  set_programs(visits);
}

void FullyShardedCore::Impl::set_programs(const std::vector<int64_t>& visits) {
  follower.set_programs(
      pass_programs(held.owners(), visits,
                    {.reshard_after_forward = options.reshard_after_forward,
                     .prefetch = options.prefetch,
                     .alone = group.size() == 1}));
}

Agreed FullyShardedCore::Impl::agree(Act mine) {
  const Agreed agreed = wrappers::agree(
      mine, group, [this](Part part) { follower.repeat(part); });
  if (agreed.active > 0) buffers_root = agreed.first;
  return agreed;
}

// What has joined has heard already what the others begin.
void FullyShardedCore::Impl::enter(Part part, bool again) {
  if (!stands_by) agree(act_of(part, again));
}

void FullyShardedCore::begin_forward() {
  Impl& self = *impl_;
  TS_CHECK(!self.is_gathered,
           "fully_shard: forward() while gather()'s result lives.");
  TS_CHECK(!self.goes_back,
           "fully_shard: the backward before this forward did not end, and its "
           "gradients were not reduced.");
  TS_CHECK(self.refusal.empty(), self.refusal);
  TS_CHECK(self.held.are_in_place(),
           "fully_shard: parameters got other memory since the module was "
           "sharded, by to(), set_data() or torch::load(). Shard it after "
           "moving it, and load it while what gather() gives lives.");
  self.follow_module();
  const bool trains = at::GradMode::is_enabled();
  if (trains) self.note_graph();
  self.begin_forward(trains ? Part::kForward : Part::kEvaluation);
}

void FullyShardedCore::Impl::begin_forward(Part part) {
  follower.begin(part);
  share_buffers();
}

// Of who has joined they are those of its last batch.
void FullyShardedCore::Impl::share_buffers() {
  if (!options.broadcast_buffers) return;
  const Unheard unheard;
  broadcast_all(module.buffers(), group, buffers_root);
}

void FullyShardedCore::end_forward() {
  Impl& self = *impl_;
  const bool trains = self.follower.part() == Part::kForward;
  self.follower.finish();
  if (trains) self.require_members();
  if (!trains || self.order_is_known) return;
  self.agree(Act::kOrder);
  self.adopt_order();
}

// Parameters that were frozen since, or are trained again, are so where they
// are whole.
void FullyShardedCore::Impl::follow_module() {
  const size_t now = module.parameters().size();
  TS_CHECK(now == num_parameters, "fully_shard: the module has ", now,
           " parameters, and had ", num_parameters,
           " when it was sharded. Register them all before.");
  const auto& shards = held.shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    const bool trains = shards[i].requires_grad();
    if (held.whole()[i].requires_grad() == trains) continue;
    TS_CHECK(!trains || held.is_trained(i),
             "fully_shard: ", held.parameters().parameters()[i].name,
             " requires a gradient, and did not when the module was sharded: "
             "nobody would reduce it. Shard the module with all that will be "
             "trained, and freeze afterwards.");
    held.whole()[i].requires_grad_(trains);
  }
}

void FullyShardedCore::Impl::note_graph() {
  for (size_t i = 0; i < in_graph.size(); ++i) {
    in_graph[i] =
        torch::autograd::impl::try_get_grad_accumulator(shard(i)) != nullptr;
  }
}

// What forward() computes with is whole, or nobody reduces its gradient.
void FullyShardedCore::Impl::require_members() {
  for (size_t i = 0; i < in_graph.size(); ++i) {
    const bool is_used =
        !in_graph[i] &&
        torch::autograd::impl::try_get_grad_accumulator(shard(i)) != nullptr;
    TS_CHECK(!is_used, "fully_shard: forward() computes with ",
             held.parameters().trained()[i].name,
             " as parameters() has it, which is this rank's shard. Use the "
             "member of the module's class (`weight`), which is whole.");
  }
}

// Once: what all ranks did in their first forward, if they did the same.
void FullyShardedCore::Impl::adopt_order() {
  order_is_known = true;
  std::vector<int64_t> visits = follower.visits();
  for (int64_t owner = 1; owner < static_cast<int64_t>(held.owners().size());
       ++owner) {
    if (std::ranges::count(visits, owner) == 0) visits.push_back(owner);
  }
  const at::NoGradGuard no_grad;
  at::Tensor size =
      at::tensor({static_cast<int64_t>(visits.size())}, at::kLong);
  at::Tensor sizes = at::stack({size, -size});
  group.all_reduce(sizes, comm::ReduceOp::kMax).synchronize();
  if (sizes[0].item<int64_t>() != -sizes[1].item<int64_t>()) return;
  at::Tensor mine = at::tensor(visits, at::kLong);
  at::Tensor both = at::stack({mine, -mine});
  group.all_reduce(both, comm::ReduceOp::kMax).synchronize();
  if (at::equal(both[0], -both[1])) set_programs(visits);
}

void FullyShardedCore::accumulate(const at::Tensor& loss) {
  impl_->run_backward({loss}, {}, Act::kAccumulated);
}

void FullyShardedCore::backward(const at::Tensor& loss) {
  impl_->run_backward({loss}, {}, Act::kReduced);
}

void FullyShardedCore::backward(const std::vector<at::Tensor>& outputs,
                                const std::vector<at::Tensor>& gradients,
                                bool is_last) {
  impl_->run_backward(outputs, gradients,
                      is_last ? Act::kReduced : Act::kAccumulated);
}

void FullyShardedCore::Impl::run_backward(
    const std::vector<at::Tensor>& from,
    const std::vector<at::Tensor>& gradients, Act end) {
  ends_by_itself = false;
  const auto reset = c10::make_scope_exit([this] { ends_by_itself = true; });
  begin_backward();
  wrappers::run_backward(from, gradients);
  end_backward(end);
}

void FullyShardedCore::Impl::begin_backward() {
  if (goes_back) return;
  goes_back = true;
  begin_gradients();
  follower.begin(Part::kBackward);
  if (!ends_by_itself) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this] { end_backward(Act::kReduced); });
}

// Of the first backward of a step: what optimizers see is kept aside.
void FullyShardedCore::Impl::begin_gradients() {
  if (accumulates) return;
  const Unheard unheard;
  const MemoryScope scope(MemoryKind::kGradients);
  for (size_t i = 0; i < kept.size(); ++i) {
    const at::Tensor seen = shard(i).grad();
    kept[i] = seen.defined() ? seen.detach().clone() : at::Tensor();
    shard(i).mutable_grad() = at::Tensor();
    touched[i] = false;
  }
  held.parameters().zero_gradients();
}

void FullyShardedCore::Impl::end_backward(Act end) {
  const Unheard unheard;
  follower.finish();
  const Agreed agreed = agree(end);
  ended_backward(agreed);
}

void FullyShardedCore::Impl::ended_backward(const Agreed& agreed) {
  goes_back = false;
  accumulates = agreed.act == Act::kAccumulated;
  if (accumulates) return;
  follower.complete();
  publish_gradients(agreed.active);
}

void FullyShardedCore::Impl::publish_gradients(int64_t active) {
  const at::NoGradGuard no_grad;
  const std::vector<bool> any = touched_anywhere();
  for (size_t i = 0; i < kept.size(); ++i) {
    at::Tensor sum = held.parameters().trained()[i].gradient;
    if (active > 1) sum.div_(active);
    const at::Tensor own = shard(i);
    // Of what was computed with the shard itself, as a penalty on weights.
    const at::Tensor beside = own.grad();
    if (kept[i].defined()) sum.add_(kept[i]);
    if (beside.defined()) sum.add_(beside.to_dense().view(sum.sizes()));
    if (!any[i] && !kept[i].defined() && !beside.defined()) continue;
    const MemoryScope scope(MemoryKind::kGradients);
    // No view: zero_grad() detaches it.
    own.mutable_grad() =
        sum.view(own.sizes()).to(own.scalar_type()).variable_data();
    kept[i] = at::Tensor();
  }
}

// One that no rank's loss reached has no gradient, as on one rank.
std::vector<bool> FullyShardedCore::Impl::touched_anywhere() {
  if (group.size() == 1) return touched;
  at::Tensor flags =
      at::empty({static_cast<int64_t>(touched.size())}, at::kInt);
  std::ranges::copy(touched, flags.mutable_data_ptr<int32_t>());
  group.all_reduce(flags, comm::ReduceOp::kMax, comm::Mode::kBlocking)
      .synchronize();
  const auto* first = flags.const_data_ptr<int32_t>();
  return std::vector<bool>(first, first + flags.numel());
}

double FullyShardedCore::clip_grad_norm(double most) {
  impl_->agree(Act::kClip);
  return impl_->clip(most);
}

// Those that there are; `counted`: that count on this rank in a norm.
std::vector<at::Tensor> FullyShardedCore::Impl::gradients(bool counted) const {
  const mesh::Coord coord = mesh.coord_of(world.rank());
  std::vector<at::Tensor> found;
  for (size_t i = 0; i < kept.size(); ++i) {
    const at::Tensor gradient = shard(i).grad();
    if (!gradient.defined()) continue;
    if (!counted || held.counts(i, coord)) found.push_back(gradient);
  }
  return found;
}

at::Tensor FullyShardedCore::Impl::sum_of_squares() const {
  const at::NoGradGuard no_grad;
  return optim::sum_of_squares(gradients(/*counted=*/true)).reshape({1});
}

at::Tensor FullyShardedCore::sum_of_squares() const {
  return impl_->sum_of_squares();
}

void FullyShardedCore::scale_gradients(double by) {
  const at::NoGradGuard no_grad;
  optim::scale_gradients(impl_->gradients(/*counted=*/false), by);
}

comm::Group& FullyShardedCore::world() const { return impl_->world; }

int64_t FullyShardedCore::pipeline_stage() const {
  return impl_->mesh.coord_of(impl_->world.rank())[Axis::kPp];
}

void FullyShardedCore::drop_accumulated() {
  Impl& self = *impl_;
  if (!std::exchange(self.accumulates, false)) return;
  for (size_t i = 0; i < self.kept.size(); ++i) {
    self.shard(i).mutable_grad() = std::exchange(self.kept[i], {});
  }
}

// `most` of a rank that has joined is that of the others.
double FullyShardedCore::Impl::clip(double most) {
  const at::NoGradGuard no_grad;
  const at::Tensor squares = sum_of_squares();
  at::Tensor limit = at::full({1}, most, at::kDouble);
  world.all_reduce(squares).synchronize();
  world.all_reduce(limit, comm::ReduceOp::kMax).synchronize();
  const double norm = std::sqrt(squares.item<double>());
  optim::scale_gradients(gradients(/*counted=*/false),
                         scale_within(norm, limit.item<double>()));
  return norm;
}

GatheredParameters FullyShardedCore::gather() {
  Impl& self = *impl_;
  TS_CHECK(!self.goes_back && !self.is_gathered,
           "fully_shard: gather() in a backward, or twice.");
  self.is_gathered = true;
  self.held.set_gathered(true);
  self.follower.free_all();  // shards may be others since a forward
  self.follower.gather_all();
  const Unheard unheard;
  // The members of classes, but in the type of the masters and their shapes.
  std::vector<at::Tensor> masters = self.held.parameters().full_masters();
  std::vector<at::Tensor> shown, windows;
  for (size_t i = 0; i < masters.size(); ++i) {
    const bool rounds =
        masters[i].scalar_type() != self.held.whole()[i].scalar_type();
    at::Tensor each = self.held.whole()[i];
    if (rounds) {
      each = masters[i].view(self.held.whole()[i].sizes()).variable_data();
      each.requires_grad_(self.held.shards()[i].requires_grad());
    }
    windows.push_back(each.detach());
    shown.push_back(std::move(each));
  }
  replace_parameters(self.module, self.held.shards(), shown);
  return GatheredParameters([&self, masters, shown, windows] {
    try {
      self.take_back(masters, shown, windows);
    } catch (const std::exception& error) {
      self.refusal = message_of(error);
    }
  });
}

// What gather() has shown, and whoever had it has written to, given other
// memory (torch::load() does), frozen, or begun to train.
void FullyShardedCore::Impl::take_back(const std::vector<at::Tensor>& masters,
                                       const std::vector<at::Tensor>& shown,
                                       const std::vector<at::Tensor>& windows) {
  const Unheard no_use;
  const at::NoGradGuard no_grad;
  is_gathered = false;
  held.set_gathered(false);
  replace_parameters(module, shown, held.shards());
  for (size_t i = 0; i < shown.size(); ++i) {
    const std::string& name = held.parameters().parameters()[i].name;
    if (!shown[i].is_alias_of(windows[i])) {
      TS_CHECK(shown[i].sizes() == windows[i].sizes(), "fully_shard: ", name,
               " has ", windows[i].sizes(), ", and was given a tensor of ",
               shown[i].sizes(),
               " while gather()'s result lived. Load what was saved of this "
               "module.");
      masters[i].copy_(shown[i].detach().reshape(masters[i].sizes()));
      shown[i].set_data(windows[i]);
    }
    const bool trains = shown[i].requires_grad();
    TS_CHECK(!trains || held.is_trained(i), "fully_shard: ", name,
             " was frozen when the module was sharded, and cannot be trained "
             "now. Shard the module with all that will be trained.");
    held.whole()[i].requires_grad_(trains);
    held.shards()[i].requires_grad_(trains);
  }
  held.parameters().take(masters);
  follower.free_all();
}

void FullyShardedCore::join(const std::function<void()>& step) {
  Impl& self = *impl_;
  TS_CHECK(!self.held.has_experts(),
           "fully_shard: join() with a MoE, whose experts the others need: "
           "give every rank as many batches.");
  TS_CHECK(
      self.mesh.degree(Axis::kPp) == 1,
      "fully_shard: join() in a stage of a pipeline, whose neighbours wait "
      "for its micro-batches: give every rank as many batches.");
  require_joinable(self.module);
  // Those of this rank's last step, which is done.
  if (!self.accumulates) {
    for (size_t i = 0; i < self.kept.size(); ++i) {
      self.shard(i).mutable_grad() = at::Tensor();
    }
  }
  self.stands_by = true;
  const auto reset = c10::make_scope_exit([&self] { self.stands_by = false; });
  bool steps = false;  // the others do, once they have clipped
  for (;;) {
    const Agreed agreed = self.agree(Act::kNothing);
    if (steps && agreed.act != Act::kClip) {
      steps = false;
      step();
    }
    if (agreed.active == 0) return self.share_buffers();
    self.take_part(agreed);
    if (agreed.act == Act::kReduced) steps = true;
  }
}

// In what the others are about to do, with nothing to give.
void FullyShardedCore::Impl::take_part(const Agreed& agreed) {
  switch (agreed.act) {
    case Act::kForward:
    case Act::kEvaluation:
      begin_forward(part_of(agreed.act));
      return follower.finish();
    case Act::kOrder:
      return adopt_order();
    case Act::kBackward:
      goes_back = true;
      begin_gradients();
      follower.begin(Part::kBackward);
      return follower.finish();
    case Act::kAccumulated:
    case Act::kReduced:
      return ended_backward(agreed);
    case Act::kClip:
      clip(/*most=*/0);
      return;
    default:
      return;
  }
}

FullyShardedCore::FullyShardedCore(torch::nn::Module& module,
                                   const mesh::DeviceMesh& mesh,
                                   comm::Communicator& ranks,
                                   const FullyShardOptions& options)
    : impl_(std::make_unique<Impl>(module, mesh, ranks, options)) {}
FullyShardedCore::~FullyShardedCore() = default;
FullyShardedCore::FullyShardedCore(FullyShardedCore&&) noexcept = default;

at::Tensor FullyShardedCore::round(const at::Tensor& argument) const {
  const auto type = impl_->options.compute_dtype;
  const bool rounds =
      type && argument.defined() && at::isFloatingType(argument.scalar_type());
  return rounds ? argument.to(*type) : argument;
}

std::vector<ParameterShard> FullyShardedCore::shards() const {
  Impl& self = *impl_;
  return self.held.local_shards(self.mesh,
                                self.mesh.coord_of(self.world.rank()));
}

std::vector<std::string> FullyShardedCore::units() const {
  return impl_->held.names();
}

ShardedMemory FullyShardedCore::memory_plan(int64_t state_bytes) const {
  return sharded_memory(impl_->held.memory(), impl_->follower.programs(),
                        state_bytes);
}

}  // namespace tessera::wrappers
