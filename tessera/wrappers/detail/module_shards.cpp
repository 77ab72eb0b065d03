#include "tessera/wrappers/detail/module_shards.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/mesh/slice.h"
#include "tessera/wrappers/detail/pass_follower.h"
#include "tessera/wrappers/detail/same_parameters.h"

namespace tessera::wrappers {

using mesh::Axis;

namespace {

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

void take_values_of_rank_0(torch::nn::Module& module,
                           const std::vector<ModuleUnit>& units,
                           comm::Group& data) {
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
  require_same_parameters(named, data);
  broadcast_all(values, data, /*root=*/0);
}

// Of this process: ranks that are threads have modules of their own.
struct Sharded {
  std::mutex mutex;
  std::set<const torch::nn::Module*> modules;
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
  all.modules.insert(modules_.begin(), modules_.end());
}

ShardedModules::~ShardedModules() {
  Sharded& all = sharded();
  const std::lock_guard lock(all.mutex);
  for (const auto* each : modules_) all.modules.erase(each);
}

ModuleShards::ModuleShards(torch::nn::Module& module,
                           const mesh::DeviceMesh& mesh,
                           comm::Communicator& ranks, comm::Group& data,
                           const FullyShardOptions& options)
    : modules_(module) {
  check(module, mesh, ranks, options);
  const auto units = units_of(module, options.units);
  take_values_of_rank_0(module, units, data);
  lay_out(units, mesh, ranks, options);
  put_shards(module);
}

void ModuleShards::lay_out(const std::vector<ModuleUnit>& units,
                           const mesh::DeviceMesh& mesh,
                           comm::Communicator& ranks,
                           const FullyShardOptions& options) {
  const at::NoGradGuard no_grad;
  const int64_t stage = options.zero_stage;
  const mesh::Coord coord = mesh.coord_of(ranks.rank());
  std::vector<std::vector<parallel::data::Bundle>> bundles;
  std::vector<at::Tensor> scalars;
  std::vector<std::pair<at::Tensor, CarriedSubstitute>> substitutes;
  for (const auto& unit : units) {
    for (const auto& parameter : unit.parameters) {
      at::Tensor tensor = parameter.tensor;
      substitutes.emplace_back(tensor, CarriedSubstitute(tensor));
      if (substitutes.back().second.is_share()) {
        shared_out_.insert(parameter.name);
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
    names_.push_back(unit.name);
    owners_.push_back(std::move(owner));
  }
  parameters_ = std::make_unique<parallel::data::ShardedParameters>(
      std::move(bundles), ranks,
      parallel::data::GradientOptions{.dtype = options.reduce_dtype},
      options.compute_dtype);
  for (auto& scalar : scalars)
    scalar.set_data(scalar.detach().reshape(at::IntArrayRef()));
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

void ModuleShards::hear(HeardMemory& memory) const {
  for (size_t i = 0; i < whole_.size(); ++i) {
    const int64_t owner = parameters_->parameters()[i].unit;
    memory.hear(whole_[i], PassFollower::tag_of(owner, /*is_gradient=*/false));
    if (!whole_[i].grad().defined()) continue;
    memory.hear(whole_[i].grad(),
                PassFollower::tag_of(owner, /*is_gradient=*/true));
  }
}

// What is shared out over tp counts on each of its ranks.
bool ModuleShards::counts(size_t trained, mesh::Coord coord) const {
  const auto& local = parameters_->trained()[trained];
  if (shared_out_.contains(local.name)) coord[Axis::kTp] = 0;
  return local.layout.owned_by(coord);
}

}  // namespace tessera::wrappers
