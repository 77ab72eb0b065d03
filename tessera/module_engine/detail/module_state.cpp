#include "tessera/module_engine/detail/module_state.h"

#include <filesystem>

#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/agree.h"

namespace tessera::detail {

using checkpoint::TensorEntry;
using wrappers::ParameterShard;

TensorEntry entry_of(const std::string& name, const ParameterShard& shard,
                     const at::Tensor& local) {
  return {.name = name,
          .global_shape = shard.shape,
          .box = shard.box,
          .local = local.view(shard.box.size),
          .owned = shard.owned};
}

TensorEntry common_entry(const std::string& name, const at::Tensor& value,
                         bool is_first) {
  const auto shape = value.sizes().vec();
  return {.name = name,
          .global_shape = shape,
          .box = {std::vector<int64_t>(shape.size()), shape},
          .local = value,
          .owned = is_first};
}

std::optional<int64_t> load_from(const std::string& folder,
                                 checkpoint::State& state, comm::Group& world,
                                 const checkpoint::LoadOptions& options) {
  bool is_step = false;
  comm::on_first(world, "looking for a checkpoint in " + folder, [&] {
    is_step = std::filesystem::exists(std::filesystem::path(folder) /
                                      checkpoint::kManifestName);
  });
  is_step = comm::numbers_of_rank_0(world, {is_step})[0] != 0;
  return is_step ? checkpoint::load(folder, state, world, options)
                 : checkpoint::load_latest(folder, state, world, options);
}

}  // namespace tessera::detail
