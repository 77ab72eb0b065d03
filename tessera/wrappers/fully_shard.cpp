#include "tessera/wrappers/fully_shard.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/mesh/slice.h"
#include "tessera/optim/gradient_norm.h"
#include "tessera/parallel/data/sharded_parameters.h"
#include "tessera/parallel/data/zero_config.h"
#include "tessera/wrappers/detail/gradient_hooks.h"
#include "tessera/wrappers/detail/module_units.h"
#include "tessera/wrappers/detail/pass_follower.h"
#include "tessera/wrappers/detail/same_parameters.h"

namespace tessera::wrappers {

using mesh::Axis;
using parallel::data::LocalParameter;

namespace {

// What a rank is about to do.
enum class Act : int64_t {
  kNothing,  // it has joined
  kForward,
  kEvaluation,
  kOrder,  // of units, after a first forward
  kBackward,
  kAccumulated,  // a backward has ended, which was not a step's last
  kReduced,      // it was
  kClip,
  // What only some ranks have to begin again; the others repeat it.
  kForwardAgain,
  kEvaluationAgain,
  kBackwardAgain,
};

bool is_again(Act act) { return act >= Act::kForwardAgain; }

const char* name_of(Act act) {
  constexpr std::array kNames = {
      "joined",
      "forward()",
      "forward() without gradients",
      "the end of its first forward()",
      "backward",
      "the end of accumulate()",
      "the end of backward",
      "clip_grad_norm()",
      "forward()",
      "forward() without gradients",
      "backward",
  };
  return kNames.at(static_cast<size_t>(act));
}

// What all ranks that have data are about to do, and how many have.
struct Agreed {
  Act act = Act::kNothing;
  int64_t active = 0;
};

Act act_of(Part part, bool again) {
  switch (part) {
    case Part::kForward:
      return again ? Act::kForwardAgain : Act::kForward;
    case Part::kEvaluation:
      return again ? Act::kEvaluationAgain : Act::kEvaluation;
    default:
      return again ? Act::kBackwardAgain : Act::kBackward;
  }
}

Part part_of(Act act) {
  switch (act) {
    case Act::kForward:
    case Act::kForwardAgain:
      return Part::kForward;
    case Act::kEvaluation:
    case Act::kEvaluationAgain:
      return Part::kEvaluation;
    default:
      return Part::kBackward;
  }
}

void check(torch::nn::Module& module, const mesh::DeviceMesh& mesh,
           const comm::Communicator& ranks, const FullyShardOptions& options) {
  TS_CHECK_CONFIG(options.zero_stage >= 1 && options.zero_stage <= 3,
                  "fully_shard: zero_stage is ", options.zero_stage,
                  "; 1, 2 and 3 shard. DistributedDataParallel is stage 0.");
  const auto is_floating = [](std::optional<at::ScalarType> type) {
    return !type || at::isFloatingType(*type);
  };
  TS_CHECK_CONFIG(
      is_floating(options.compute_dtype) && is_floating(options.reduce_dtype),
      "fully_shard: compute_dtype and reduce_dtype are types of "
      "floating-point numbers.");
  TS_CHECK_CONFIG(options.prefetch >= -1, "fully_shard: prefetch is ",
                  options.prefetch,
                  "; it counts units, and -1 stands for the default.");
  TS_CHECK_CONFIG(mesh.world_size() == ranks.world_size(),
                  "fully_shard: the mesh is of ", mesh.world_size(), " ranks (",
                  mesh.describe(), "), the communicator of ",
                  ranks.world_size(), ".");
  const int64_t data =
      mesh.degree(Axis::kDpReplicate) * mesh.degree(Axis::kDpShard);
  TS_CHECK_CONFIG(data * mesh.degree(Axis::kTp) == mesh.world_size(),
                  "fully_shard: ", mesh.describe(),
                  ": ranks lie along dp_shard, dp_replicate and tp alone.");
  TS_CHECK_CONFIG(data == 1 || mesh.degree(Axis::kDpShard) > 1,
                  "fully_shard: dp_shard is 1: nothing is shared out. Give "
                  "ranks to dp_shard, or use DistributedDataParallel.");
  for (const auto& item : module.named_modules()) {
    const auto* each = item.value().get();
    TS_CHECK_CONFIG(
        !dynamic_cast<const torch::nn::ParameterListImpl*>(each) &&
            !dynamic_cast<const torch::nn::ParameterDictImpl*>(each),
        "fully_shard: \"", item.key(), "\" is a ", each->name(),
        ", which reads its own parameters() in forward: they would be shards. "
        "Use register_parameter() and a member for each.");
  }
}

}  // namespace

struct FullyShardedCore::Impl {
  Impl(torch::nn::Module& of, const mesh::DeviceMesh& on,
       comm::Communicator& ranks, const FullyShardOptions& asked);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void take_values_of_rank_0(const std::vector<ModuleUnit>& units);
  void lay_out(std::vector<ModuleUnit> units, comm::Communicator& ranks);
  void hear(const std::vector<ModuleUnit>& units);
  void set_programs(const std::vector<int64_t>& visits);

  Agreed agree(Act mine);
  std::vector<Act> acts_of_all(Act mine);
  Agreed agreed_of(const std::vector<Act>& acts) const;
  void enter(Part part, bool again);
  void begin_forward(Part part);
  void adopt_order();
  void begin_backward();
  void end_backward(Act end);
  void ended_backward(const Agreed& agreed);
  void run_backward(const at::Tensor& loss, Act end);
  void begin_gradients();
  void publish_gradients(int64_t active);
  std::vector<bool> touched_anywhere();
  double clip(double most);
  void take_part(const Agreed& agreed);

  torch::nn::Module& module;
  const mesh::DeviceMesh mesh;
  const FullyShardOptions options;
  comm::Group& world;
  comm::Group* group = nullptr;  // of the ranks that see other data
  int64_t prefetch = 0;
  std::vector<std::string> names;     // of units
  std::vector<program::Unit> owners;  // as programs know them
  std::set<std::string> shared_out;   // over tp: names of parameters
  std::unique_ptr<parallel::data::ShardedParameters> parameters;
  std::vector<at::Tensor> whole, shards;  // by LocalParameter
  std::vector<size_t> trained;            // of these: in the order of trained()
  std::unique_ptr<PassFollower> follower;
  std::unique_ptr<HeardMemory> memory;
  GradientHooks hooks;
  bool order_is_known = false;
  bool is_gathered = false;      // by gather()
  bool goes_back = false;        // a backward is under way
  bool ends_by_itself = true;    // loss.backward(): by a callback
  bool accumulates = false;      // gradients of micro-batches wait
  bool stands_by = false;        // takes part in what others do
  std::vector<at::Tensor> kept;  // by trained: gradients of before
  std::vector<bool> touched;     // by trained: a gradient came
};

FullyShardedCore::Impl::Impl(torch::nn::Module& of, const mesh::DeviceMesh& on,
                             comm::Communicator& ranks,
                             const FullyShardOptions& asked)
    : module(of), mesh(on), options(asked), world(ranks.world()) {
  check(module, mesh, ranks, options);
  group = ranks.make_group(
      mesh.peers(ranks.rank(), {Axis::kDpReplicate, Axis::kDpShard}), "data");
  parallel::data::ZeroConfig zero;
  zero.prefetch = options.prefetch;
  prefetch = zero.resolved(ranks.backend() == "shm").prefetch;
  auto units = units_of(module, options.units);
  take_values_of_rank_0(units);
  lay_out(std::move(units), ranks);
}

void FullyShardedCore::Impl::take_values_of_rank_0(
    const std::vector<ModuleUnit>& units) {
  std::vector<NamedParameter> named;
  std::vector<at::Tensor> values;
  for (const auto& unit : units) {
    for (const auto& parameter : unit.parameters) {
      TS_CHECK_CONFIG(!parameter.tensor.grad().defined(),
                      "fully_shard: ", parameter.name,
                      " has a gradient already. Shard the module first, or "
                      "call zero_grad().");
      named.push_back({parameter.name, parameter.tensor});
      values.push_back(parameter.tensor);
    }
  }
  for (const auto& buffer : module.buffers()) values.push_back(buffer);
  TS_CHECK_CONFIG(!named.empty(), "fully_shard: the module has no parameters.");
  require_same_parameters(named, *group);
  broadcast_all(values, *group, /*root=*/0);
}

void FullyShardedCore::Impl::lay_out(std::vector<ModuleUnit> units,
                                     comm::Communicator& ranks) {
  const at::NoGradGuard no_grad;
  const int64_t stage = options.zero_stage;
  const mesh::Coord coord = mesh.coord_of(ranks.rank());
  std::vector<std::vector<parallel::data::Bundle>> bundles;
  std::vector<at::Tensor> scalars;
  std::vector<std::pair<at::Tensor, CarriedSubstitute>> substitutes;
  for (auto& unit : units) {
    for (auto& parameter : unit.parameters) {
      at::Tensor& tensor = parameter.tensor;
      substitutes.emplace_back(tensor, CarriedSubstitute(tensor));
      if (substitutes.back().second.is_share()) {
        shared_out.insert(parameter.name);
      }
      parameter.spec->is_frozen = !tensor.requires_grad();
      at::Tensor all = tensor.detach();
      if (all.dim() == 0) {  // a row of one
        all = all.view({1});
        parameter.spec->layout = mesh::Layout({1});
        scalars.push_back(tensor);
      }
      parallel::data::set_layout(parameter, stage);
      const auto box = parameter.spec->layout.local_box(mesh, coord);
      tensor.set_data(mesh::slice(all, box).clone());
    }
    bundles.push_back(
        parallel::data::bundles_of(unit.parameters, mesh, ranks.rank(), stage));
    const bool empty = unit.parameters.empty();
    program::Unit owner{.zero_stage = empty ? 0 : stage, .reduced = !empty};
    for (const auto& bundle : bundles.back()) {
      owner.summed |= bundle.is_summed();
      if (!bundle.is_sharded()) continue;
      const at::Tensor& like = bundle.parameters[0].tensor;
      owner.bytes += bundle.cut.numel() * bundle.cut.ranks() *
                     static_cast<int64_t>(like.element_size());
    }
    names.push_back(unit.name);
    owners.push_back(std::move(owner));
  }
  parameters = std::make_unique<parallel::data::ShardedParameters>(
      std::move(bundles), ranks,
      parallel::data::GradientOptions{.dtype = options.reduce_dtype},
      options.compute_dtype);
  for (auto& scalar : scalars)
    scalar.set_data(scalar.detach().reshape(at::IntArrayRef()));
  for (auto& [tensor, substitute] : substitutes) substitute.put(tensor);
  hear(units);
}

void FullyShardedCore::Impl::hear(const std::vector<ModuleUnit>& units) {
  std::vector<int64_t> stages;
  for (const auto& owner : owners) stages.push_back(owner.zero_stage);
  follower = std::make_unique<PassFollower>(
      *parameters, names, stages,
      [this](Part part, bool again) { enter(part, again); },
      [this] { begin_backward(); });
  memory = std::make_unique<HeardMemory>(*follower);
  std::vector<int64_t> visits;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    const auto owner = static_cast<int64_t>(unit);
    if (owner > 0) visits.push_back(owner);
    for (const at::Tensor& tensor : parameters->full(owner)) {
      whole.push_back(tensor);
      memory->hear(tensor, PassFollower::tag_of(owner, /*is_gradient=*/false));
      if (!tensor.grad().defined()) continue;
      memory->hear(tensor.grad(),
                   PassFollower::tag_of(owner, /*is_gradient=*/true));
    }
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    const LocalParameter& local = parameters->parameters()[i];
    at::Tensor shard = local.shard.detach();
    shard.requires_grad_(whole[i].requires_grad());
    shards.push_back(std::move(shard));
    if (!whole[i].requires_grad()) continue;
    const size_t place = trained.size();
    trained.push_back(i);
    hooks.add(whole[i], [this, place] { touched[place] = true; });
  }
  touched.assign(trained.size(), false);
  kept.resize(trained.size());
  replace_parameters(module, whole, shards);
  set_programs(visits);
}

void FullyShardedCore::Impl::set_programs(const std::vector<int64_t>& visits) {
  follower->set_programs(
      pass_programs(owners, visits,
                    {.reshard_after_forward = options.reshard_after_forward,
                     .prefetch = prefetch,
                     .alone = group->size() == 1}));
}

// Ranks that do different things would wait for each other for ever.
Agreed FullyShardedCore::Impl::agree(Act mine) {
  if (group->size() == 1) return {mine, mine == Act::kNothing ? 0 : 1};
  for (;;) {
    const std::vector<Act> acts = acts_of_all(mine);
    const auto again = std::ranges::find_if(acts, is_again);
    if (again == acts.end()) return agreed_of(acts);
    if (mine == *again) return {mine};
    follower->repeat(part_of(*again));
  }
}

std::vector<Act> FullyShardedCore::Impl::acts_of_all(Act mine) {
  const Unheard unheard;
  const at::NoGradGuard no_grad;
  at::Tensor all = at::empty({group->size()}, at::kLong);
  group
      ->all_gather(all, at::full({1}, static_cast<int64_t>(mine), at::kLong),
                   comm::Mode::kBlocking)
      .synchronize();
  std::vector<Act> acts;
  for (int64_t rank = 0; rank < group->size(); ++rank) {
    acts.push_back(static_cast<Act>(all[rank].item<int64_t>()));
  }
  return acts;
}

Agreed FullyShardedCore::Impl::agreed_of(const std::vector<Act>& acts) const {
  Agreed agreed;
  int64_t first = 0;
  for (int64_t rank = 0; rank < group->size(); ++rank) {
    const Act act = acts[rank];
    if (act == Act::kNothing) continue;
    if (agreed.active++ == 0) {
      agreed.act = act;
      first = rank;
    }
    TS_CHECK(act == agreed.act, "fully_shard: rank ", group->ranks()[first],
             " is at ", name_of(agreed.act), ", rank ", group->ranks()[rank],
             " at ", name_of(act),
             ": ranks go forward and backward equally often; one whose data "
             "has ended calls join().");
  }
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
  TS_CHECK(self.hooks.are_heard(),
           "fully_shard: parameters got another dtype or device since the "
           "module was sharded. Shard it after moving it.");
  const bool trains = at::GradMode::is_enabled();
  self.begin_forward(trains ? Part::kForward : Part::kEvaluation);
}

void FullyShardedCore::Impl::begin_forward(Part part) {
  follower->begin(part);
  const Unheard unheard;
  if (options.broadcast_buffers) {
    broadcast_all(module.buffers(), *group, /*root=*/0);
  }
}

void FullyShardedCore::end_forward() {
  Impl& self = *impl_;
  const bool trains = self.follower->part() == Part::kForward;
  self.follower->finish();
  if (!trains || self.order_is_known) return;
  self.agree(Act::kOrder);
  self.adopt_order();
}

// Once: what all ranks did in their first forward, if they did the same.
void FullyShardedCore::Impl::adopt_order() {
  order_is_known = true;
  std::vector<int64_t> visits = follower->visits();
  for (int64_t owner = 1; owner < static_cast<int64_t>(owners.size());
       ++owner) {
    if (std::ranges::count(visits, owner) == 0) visits.push_back(owner);
  }
  const at::NoGradGuard no_grad;
  at::Tensor size =
      at::tensor({static_cast<int64_t>(visits.size())}, at::kLong);
  at::Tensor sizes = at::stack({size, -size});
  group->all_reduce(sizes, comm::ReduceOp::kMax).synchronize();
  if (sizes[0].item<int64_t>() != -sizes[1].item<int64_t>()) return;
  at::Tensor mine = at::tensor(visits, at::kLong);
  at::Tensor both = at::stack({mine, -mine});
  group->all_reduce(both, comm::ReduceOp::kMax).synchronize();
  if (at::equal(both[0], -both[1])) set_programs(visits);
}

void FullyShardedCore::accumulate(const at::Tensor& loss) {
  impl_->run_backward(loss, Act::kAccumulated);
}

void FullyShardedCore::backward(const at::Tensor& loss) {
  impl_->run_backward(loss, Act::kReduced);
}

void FullyShardedCore::Impl::run_backward(const at::Tensor& loss, Act end) {
  ends_by_itself = false;
  const auto reset = c10::make_scope_exit([this] { ends_by_itself = true; });
  begin_backward();
  torch::autograd::backward({loss}, {});
  end_backward(end);
}

void FullyShardedCore::Impl::begin_backward() {
  if (goes_back) return;
  goes_back = true;
  begin_gradients();
  follower->begin(Part::kBackward);
  if (!ends_by_itself) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this] { end_backward(Act::kReduced); });
}

// Of the first backward of a step: what optimizers see is kept aside.
void FullyShardedCore::Impl::begin_gradients() {
  if (accumulates) return;
  const Unheard unheard;
  for (size_t i = 0; i < trained.size(); ++i) {
    const at::Tensor& seen = shards[trained[i]].grad();
    kept[i] = seen.defined() ? seen.detach().clone() : at::Tensor();
    touched[i] = false;
  }
  parameters->zero_gradients();
}

void FullyShardedCore::Impl::end_backward(Act end) {
  const Unheard unheard;
  follower->finish();
  const Agreed agreed = agree(end);
  ended_backward(agreed);
}

void FullyShardedCore::Impl::ended_backward(const Agreed& agreed) {
  goes_back = false;
  accumulates = agreed.act == Act::kAccumulated;
  if (accumulates) return;
  follower->complete();
  publish_gradients(agreed.active);
}

void FullyShardedCore::Impl::publish_gradients(int64_t active) {
  const at::NoGradGuard no_grad;
  const std::vector<bool> any = touched_anywhere();
  for (size_t i = 0; i < trained.size(); ++i) {
    at::Tensor sum = parameters->trained()[i].gradient;
    if (active > 1) sum.div_(active);
    if (kept[i].defined()) sum.add_(kept[i]);
    if (!any[i] && !kept[i].defined()) continue;
    at::Tensor& shard = shards[trained[i]];
    // No view: zero_grad() detaches it.
    shard.mutable_grad() =
        sum.view(shard.sizes()).to(shard.scalar_type()).variable_data();
    kept[i] = at::Tensor();
  }
}

// One that no rank's loss reached has no gradient, as on one rank.
std::vector<bool> FullyShardedCore::Impl::touched_anywhere() {
  if (group->size() == 1) return touched;
  at::Tensor flags =
      at::empty({static_cast<int64_t>(touched.size())}, at::kInt);
  std::ranges::copy(touched, flags.mutable_data_ptr<int32_t>());
  group->all_reduce(flags, comm::ReduceOp::kMax, comm::Mode::kBlocking)
      .synchronize();
  const auto* first = flags.const_data_ptr<int32_t>();
  return std::vector<bool>(first, first + flags.numel());
}

double FullyShardedCore::clip_grad_norm(double most) {
  impl_->agree(Act::kClip);
  return impl_->clip(most);
}

// `most` of a rank that has joined is that of the others.
double FullyShardedCore::Impl::clip(double most) {
  const at::NoGradGuard no_grad;
  const mesh::Coord coord = mesh.coord_of(world.rank());
  std::vector<at::Tensor> owned, all;
  for (size_t i = 0; i < trained.size(); ++i) {
    const at::Tensor& gradient = shards[trained[i]].grad();
    if (!gradient.defined()) continue;
    all.push_back(gradient);
    // What is shared out over tp counts on each of its ranks.
    const LocalParameter& local = parameters->trained()[i];
    mesh::Coord at = coord;
    if (shared_out.contains(local.name)) at[Axis::kTp] = 0;
    if (local.layout.owned_by(at)) owned.push_back(gradient);
  }
  const at::Tensor squares = optim::sum_of_squares(owned).reshape({1});
  at::Tensor limit = at::full({1}, most, at::kDouble);
  world.all_reduce(squares).synchronize();
  world.all_reduce(limit, comm::ReduceOp::kMax).synchronize();
  const double norm = std::sqrt(squares.item<double>());
  optim::scale_gradients(all, optim::clip_scale(norm, limit.item<double>()));
  return norm;
}

GatheredParameters FullyShardedCore::gather() {
  Impl& self = *impl_;
  TS_CHECK(!self.goes_back && !self.is_gathered,
           "fully_shard: gather() in a backward, or twice.");
  self.is_gathered = true;
  self.follower->gather_all();
  const Unheard unheard;
  // The members of classes, but in the type of the masters and their shapes.
  std::vector<at::Tensor> masters = self.parameters->full_masters();
  std::vector<at::Tensor> shown;
  for (size_t i = 0; i < masters.size(); ++i) {
    const bool rounds = masters[i].scalar_type() != self.whole[i].scalar_type();
    at::Tensor each = self.whole[i];
    if (rounds) {
      each = masters[i].view(self.whole[i].sizes()).variable_data();
      each.requires_grad_(self.shards[i].requires_grad());
    }
    shown.push_back(std::move(each));
  }
  replace_parameters(self.module, self.shards, shown);
  return GatheredParameters([&self, masters, shown] {
    const Unheard no_use;
    replace_parameters(self.module, shown, self.shards);
    self.parameters->take(masters);
    self.follower->free_all();
    self.is_gathered = false;
  });
}

void FullyShardedCore::join(const std::function<void()>& step) {
  Impl& self = *impl_;
  self.stands_by = true;
  const auto reset = c10::make_scope_exit([&self] { self.stands_by = false; });
  bool steps = false;  // the others do, once they have clipped
  for (;;) {
    const Agreed agreed = self.agree(Act::kNothing);
    if (steps && agreed.act != Act::kClip) {
      steps = false;
      step();
    }
    if (agreed.active == 0) return;
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
      return follower->finish();
    case Act::kOrder:
      return adopt_order();
    case Act::kBackward:
      goes_back = true;
      begin_gradients();
      follower->begin(Part::kBackward);
      return follower->finish();
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

std::vector<std::string> FullyShardedCore::units() const {
  return impl_->names;
}

}  // namespace tessera::wrappers
