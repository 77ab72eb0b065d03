#include "tessera/wrappers/parameter_shard.h"

#include "tessera/core/error.h"
#include "tessera/wrappers/detail/heard_memory.h"
#include "tessera/wrappers/detail/module_shards.h"
#include "tessera/wrappers/detail/same_parameters.h"
#include "tessera/wrappers/moe.h"

namespace tessera::wrappers {
namespace {

// What lies here is all of it, but for parts along tp.
void require_whole(torch::nn::Module& module) {
  for (const auto& item : module.named_modules()) {
    TS_CHECK_CONFIG(!is_sharded(*item.value()), "\"", item.key(), "\", a ",
                    item.value()->name(),
                    ", has shards for parameters. Give what fully_shard() "
                    "returned, and not its module.");
    const auto* experts = dynamic_cast<const LocalExperts*>(item.value().get());
    TS_CHECK_CONFIG(!experts || experts->ranks() == 1, "\"", item.key(),
                    "\" has its experts on ", experts ? experts->ranks() : 0,
                    " ranks, under the same names. Give the module to "
                    "fully_shard(), with zero_stage 0 where nothing else is to "
                    "be shared out: it knows which they are.");
  }
}

ParameterShard shard_of(const std::string& name, const at::Tensor& parameter) {
  const at::Tensor values = parameter.detach();
  ParameterShard shard{.name = name,
                       .name_here = name,
                       .values = values.dim() == 0 ? values.view({1}) : values,
                       .parameter = parameter};
  shard.shape = shard.values.sizes().vec();
  shard.box = {std::vector<int64_t>(shard.shape.size()), shard.shape};
  const auto share = known_share(parameter);
  if (!share) return shard;
  shard.box.offset[share->dim] = shard.shape[share->dim] * share->index;
  shard.shape[share->dim] *= std::ssize(share->ranks);
  return shard;
}

}  // namespace

std::vector<ParameterShard> shards_of(torch::nn::Module& module) {
  require_whole(module);
  std::vector<ParameterShard> found;
  for (const auto& [name, parameter] : parameters_of(module)) {
    found.push_back(shard_of(name, parameter));
  }
  return found;
}

}  // namespace tessera::wrappers
