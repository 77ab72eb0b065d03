#include "tessera/module_engine/detail/module_state.h"

#include <filesystem>

#include "tessera/checkpoint/manifest.h"

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
  const std::filesystem::path path(folder);
  if (std::filesystem::exists(path / checkpoint::kManifestName)) {
    return checkpoint::load(folder, state, world, options);
  }
  return checkpoint::load_latest(folder, state, world, options);
}

}  // namespace tessera::detail
