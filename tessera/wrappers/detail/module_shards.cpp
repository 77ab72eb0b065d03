#include "tessera/wrappers/detail/module_shards.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/mesh/slice.h"
#include "tessera/wrappers/detail/pass_follower.h"
#include "tessera/wrappers/detail/shard_values.h"
#include "tessera/wrappers/moe.h"

namespace tessera::wrappers {

using mesh::Axis;

namespace {

void check(torch::nn::Module& module, const mesh::DeviceMesh& mesh,
           const comm::Communicator& ranks, const FullyShardOptions& options) {
  TS_CHECK_CONFIG(options.zero_stage >= 0 && options.zero_stage <= 3,
                  "fully_shard: zero_stage is ", options.zero_stage,
                  "; 1, 2 and 3 shard, 0 does not.");
  TS_CHECK_CONFIG(options.expert_stage >= -1 && options.expert_stage <= 3,
                  "fully_shard: expert_stage is ", options.expert_stage,
                  "; 1, 2 and 3 shard, 0 does not, -1 is zero_stage.");
  const int64_t of_experts = options.stage_of_experts();
  const auto is_floating = [](std::optional<at::ScalarType> type) {
    return !type || at::isFloatingType(*type);
  };
  TS_CHECK_CONFIG(
      is_floating(options.compute_dtype) && is_floating(options.reduce_dtype),
      "fully_shard: compute_dtype and reduce_dtype are types of "
      "floating-point numbers.");
  TS_CHECK_CONFIG(
      std::min(options.zero_stage, of_experts) > 0 || !options.compute_dtype,
      "fully_shard: compute_dtype with zero_stage 0, or expert_stage "
      "0, in which no rank has masters beside what it computes "
      "with. Use 1.");
  TS_CHECK_CONFIG(mesh.world_size() == ranks.world_size(),
                  "fully_shard: the mesh is of ", mesh.world_size(), " ranks (",
                  mesh.describe(), "), the communicator of ",
                  ranks.world_size(), ".");
  const int64_t data =
      mesh.degree(Axis::kDpReplicate) * mesh.degree(Axis::kDpShard);
  TS_CHECK_CONFIG(data * mesh.degree(Axis::kTp) * mesh.degree(Axis::kPp) ==
                      mesh.world_size(),
                  "fully_shard: ", mesh.describe(),
                  ": ranks lie along dp_shard, dp_replicate, tp and pp alone.");
  TS_CHECK_CONFIG(
      options.zero_stage == 0 || data == 1 || mesh.degree(Axis::kDpShard) > 1,
      "fully_shard: dp_shard is 1: nothing is shared out. Give ranks to "
      "dp_shard, or set zero_stage 0.");
  TS_CHECK_CONFIG(of_experts == 0 || data == 1 ||
                      mesh.degree(Axis::kDpShard) > 1 ||
                      mesh.degree(Axis::kEp) > 1,
                  "fully_shard: dp_shard and ep are 1: nothing of experts is "
                  "shared out. Give ranks to one of them, or set expert_stage "
                  "0.");
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

// Of this process: ranks that are threads have modules of their own.
struct Sharded {
  std::mutex mutex;
  std::map<const torch::nn::Module*, const ShardedModules*> modules;
};

Sharded& sharded() {
  static Sharded all;
  return all;
}

}  // namespace

ShardedModules::ShardedModules(torch::nn::Module& module) {
  modules_.push_back(&module);
  for (const auto& child : module.modules(/*include_self=*/false)) {
    modules_.push_back(child.get());
  }
  Sharded& all = sharded();
  const std::lock_guard lock(all.mutex);
  for (const auto* each : modules_) {
    TS_CHECK_CONFIG(!all.modules.contains(each), "fully_shard: a ",
                    each->name(),
                    " of the module is sharded already. Shard the whole "
                    "module, once, and name its parts in `units`.");
  }
  for (const auto* each : modules_) all.modules[each] = this;
}

void ShardedModules::set_ranks(std::vector<int64_t> ranks) {
  const std::lock_guard lock(sharded().mutex);
  ranks_ = std::move(ranks);
}

ShardedModules::~ShardedModules() {
  Sharded& all = sharded();
  const std::lock_guard lock(all.mutex);
  for (const auto* each : modules_) all.modules.erase(each);
}

bool is_sharded(const torch::nn::Module& module) {
  Sharded& all = sharded();
  const std::lock_guard lock(all.mutex);
  return all.modules.contains(&module);
}

std::vector<int64_t> ranks_with_shards(const torch::nn::Module& module) {
  Sharded& all = sharded();
  const std::lock_guard lock(all.mutex);
  const auto found = all.modules.find(&module);
  if (found == all.modules.end()) return {};
  return found->second->ranks();
}

ModuleShards::ModuleShards(torch::nn::Module& module,
                           const mesh::DeviceMesh& mesh,
                           comm::Communicator& ranks, comm::Group& data,
                           const FullyShardOptions& options)
    : modules_(module) {
  check(module, mesh, ranks, options);
  find_experts(module, mesh, ranks.rank());
  TS_CHECK_CONFIG(options.expert_stage < 0 || !experts_.empty() ||
                      mesh.degree(Axis::kPp) > 1,
                  "fully_shard: expert_stage is ", options.expert_stage,
                  ", but the module has no MoE. Leave it out.");
  const auto units = units_of(module, options.units);
  lay_out(module, units, mesh, ranks, data, options);
  put_shards(module);
  ranks_ = shard_ranks(mesh, ranks.rank(), options);
  set_gathered(false);
}

void ModuleShards::set_gathered(bool is_gathered) {
  modules_.set_ranks(is_gathered ? std::vector<int64_t>() : ranks_);
}

std::vector<int64_t> ModuleShards::shard_ranks(
    const mesh::DeviceMesh& mesh, int64_t rank,
    const FullyShardOptions& options) const {
  const bool cuts_experts = !experts_.empty() && options.stage_of_experts() > 0;
  std::vector<int64_t> found;
  const auto add = [&](Axis axis) {
    for (const int64_t each : mesh.peers(rank, {axis})) {
      if (std::ranges::count(found, each) == 0) found.push_back(each);
    }
  };
  if (options.zero_stage > 0 || (cuts_experts && !has_experts())) {
    add(Axis::kDpShard);
  }
  if (cuts_experts && has_experts()) add(Axis::kExpertDp);
  return found;
}

void ModuleShards::find_experts(torch::nn::Module& module,
                                const mesh::DeviceMesh& mesh, int64_t rank) {
  for (const auto& item : module.named_modules()) {
    const auto* here = dynamic_cast<const LocalExperts*>(item.value().get());
    if (!here) continue;
    here->check("fully_shard", item.key(), mesh, rank);
    TS_CHECK_CONFIG(here->buffers().empty(), "fully_shard: the experts of \"",
                    item.key(), "\" have buffers, which ranks do not share.");
    experts_[item.key()] = {here->ranks(), here->first()};
  }
}

// What follows "experts." in a name begins with the expert's number.
std::string ModuleShards::global_name(const std::string& name) const {
  for (const auto& [experts, place] : experts_) {
    if (!name.starts_with(experts + ".")) continue;
    const size_t number = experts.size() + 1, end = name.find('.', number);
    const int64_t here = std::stoll(name.substr(number, end - number));
    return c10::str(experts, ".", place.first + here, name.substr(end));
  }
  return name;
}

bool ModuleShards::is_within_experts(const std::string& name) const {
  return std::ranges::any_of(experts_, [&](const auto& each) {
    return name.starts_with(each.first + ".");
  });
}

bool ModuleShards::is_of_expert(const std::string& name) const {
  return has_experts() && is_within_experts(name);
}

int64_t ModuleShards::stage_of(const ModuleUnit& unit,
                               const FullyShardOptions& options) const {
  return is_within_experts(unit.name + ".") ? options.stage_of_experts()
                                            : options.zero_stage;
}

// Sets its layout: a scalar is a row of one, ranks along tp may have parts of
// it, those along pp another module, and those along ep other experts of the
// same name.
void ModuleShards::describe(const nn::Parameter& parameter,
                            const mesh::DeviceMesh& mesh, int64_t rank,
                            int64_t stage) const {
  std::vector<int64_t> shape = parameter.tensor.sizes().vec();
  if (shape.empty()) shape.push_back(1);
  const auto share = known_share(parameter.tensor);
  if (share) {
    TS_CHECK_CONFIG(share->ranks == mesh.peers(rank, {Axis::kTp}),
                    "fully_shard: ", parameter.name, " is cut over ",
                    share->ranks.size(),
                    " ranks, which are not those along tp of ", mesh.describe(),
                    ". Give both the same mesh.");
    shape[share->dim] *= std::ssize(share->ranks);
  }
  mesh::Layout layout(shape);
  if (is_of_expert(parameter.name)) {
    std::vector<int64_t> stacked = {num_expert_ranks()};
    stacked.insert(stacked.end(), shape.begin(), shape.end());
    layout = mesh::Layout(stacked, mesh::View::kExperts)
                 .with(Axis::kEp, mesh::Placement::shard(0));
    if (share) {
      TS_CHECK_CONFIG(mesh.degree(Axis::kEtp) == mesh.degree(Axis::kTp),
                      "fully_shard: ", parameter.name,
                      " is cut along tp, but on ", mesh.describe(),
                      " an expert is whole on its rank. Set etp to tp.");
      layout = layout.with(Axis::kEtp, mesh::Placement::shard(share->dim + 1));
    }
  } else if (share) {
    layout = layout.with(Axis::kTp, mesh::Placement::shard(share->dim));
  }
  if (mesh.degree(Axis::kPp) > 1) {
    layout = layout.on_stages({mesh.coord_of(rank)[Axis::kPp]});
  }
  parameter.spec->layout = std::move(layout);
  parameter.spec->is_frozen = !parameter.tensor.requires_grad();
  parallel::data::set_layout(parameter, stage);
}

void ModuleShards::lay_out(torch::nn::Module& module,
                           const std::vector<ModuleUnit>& units,
                           const mesh::DeviceMesh& mesh,
                           comm::Communicator& ranks, comm::Group& data,
                           const FullyShardOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<nn::Parameter> parameters;
  std::vector<std::pair<at::Tensor, CarriedSubstitute>> substitutes;
  // Those whose shape is not that of their layouts.
  std::vector<std::pair<at::Tensor, std::vector<int64_t>>> reshaped;
  for (const auto& unit : units) {
    const int64_t stage = stage_of(unit, options);
    for (const auto& parameter : unit.parameters) {
      const at::Tensor& tensor = parameter.tensor;
      describe(parameter, mesh, ranks.rank(), stage);
      substitutes.emplace_back(tensor, CarriedSubstitute(tensor));
      const auto dims = parameter.spec->layout.global_shape().size();
      if (dims != static_cast<size_t>(tensor.dim())) {
        reshaped.emplace_back(tensor, tensor.sizes().vec());
      }
      parameters.push_back(parameter);
    }
  }
  take_values(module, parameters, mesh, ranks, data, options);

  std::vector<std::vector<parallel::data::Bundle>> bundles;
  for (const auto& unit : units) {
    const int64_t stage = stage_of(unit, options);
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
    names_.push_back(unit.name);
    owners_.push_back(std::move(owner));
  }
  memory_ = memory_facts(bundles, mesh, ranks.rank(), options);
  parameters_ = std::make_unique<parallel::data::ShardedParameters>(
      std::move(bundles), ranks,
      parallel::data::GradientOptions{.dtype = options.reduce_dtype},
      at::TensorOptions().dtype(options.compute_dtype));
  for (auto& [tensor, shape] : reshaped) {
    const at::Tensor gradient = tensor.grad();
    tensor.mutable_grad() = at::Tensor();
    tensor.set_data(tensor.detach().reshape(shape));
    if (gradient.defined()) tensor.mutable_grad() = gradient.reshape(shape);
  }
  for (auto& [tensor, substitute] : substitutes) substitute.put(tensor);
}

void ModuleShards::put_shards(torch::nn::Module& module) {
  for (size_t unit = 0; unit < names_.size(); ++unit) {
    const auto full = parameters_->full(static_cast<int64_t>(unit));
    whole_.insert(whole_.end(), full.begin(), full.end());
  }
  for (size_t i = 0; i < whole_.size(); ++i) {
    at::Tensor shard = parameters_->parameters()[i].shard.detach();
    shard.requires_grad_(whole_[i].requires_grad());
    shards_.push_back(std::move(shard));
    if (whole_[i].requires_grad()) trained_.push_back(i);
  }
  replace_parameters(module, whole_, shards_);
}

std::vector<int64_t> ModuleShards::stages() const {
  std::vector<int64_t> stages;
  for (const auto& owner : owners_) stages.push_back(owner.zero_stage);
  return stages;
}

std::vector<ParameterShard> ModuleShards::local_shards(
    const mesh::DeviceMesh& mesh, const mesh::Coord& coord) const {
  std::vector<ParameterShard> found;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const auto& local = parameters_->parameters()[i];
    ParameterShard shard{.name = global_name(local.name),
                         .name_here = local.name,
                         .shape = local.layout.global_shape(),
                         .box = local.layout.local_box(mesh, coord),
                         .values = local.shard,
                         .parameter = shards_[i],
                         .owned = local.layout.owned_by(coord),
                         .unit = local.unit,
                         .layout = local.layout};
    if (local.layout.is_of_expert()) {  // one, of those that it stacks
      shard.shape.erase(shard.shape.begin());
      shard.box.offset.erase(shard.box.offset.begin());
      shard.box.size.erase(shard.box.size.begin());
      shard.values = shard.values.squeeze(0);
    }
    found.push_back(std::move(shard));
  }
  return found;
}

void ModuleShards::hear(HeardMemory& memory) {
  using Kind = PassFollower::Kind;
  size_t trained = 0;
  for (size_t i = 0; i < whole_.size(); ++i) {
    const int64_t owner = parameters_->parameters()[i].unit;
    // What is written to it is written to this rank's shard.
    const bool has_masters = shards_[i].is_alias_of(whole_[i]);
    const auto kind = has_masters ? Kind::kMasters : Kind::kCopies;
    memory.hear(whole_[i], PassFollower::tag_of(owner, kind));
    const at::Tensor& gradient = whole_[i].grad();
    if (!gradient.defined()) continue;
    memory.hear(gradient, PassFollower::tag_of(owner, Kind::kGradients));
    gradients_[place_of(gradient)] = trained++;
  }
  TORCH_INTERNAL_ASSERT(trained == trained_.size());
}

ModuleShards::Place ModuleShards::place_of(const at::Tensor& gradient) {
  return {gradient.storage().unsafeGetStorageImpl(), gradient.storage_offset(),
          gradient.numel()};
}

std::optional<size_t> ModuleShards::whose_gradient(
    const at::Tensor& gradient) const {
  const auto found = gradients_.find(place_of(gradient));
  if (found == gradients_.end()) return std::nullopt;
  return found->second;
}

bool ModuleShards::are_in_place() const {
  for (size_t i = 0; i < shards_.size(); ++i) {
    const at::Tensor& own = parameters_->parameters()[i].shard;
    if (!shards_[i].is_alias_of(own)) return false;
  }
  return true;
}

bool ModuleShards::counts(size_t trained, const mesh::Coord& coord) const {
  return parameters_->trained()[trained].layout.owned_by(coord);
}

}  // namespace tessera::wrappers
