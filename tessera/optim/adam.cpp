#include "tessera/optim/adam.h"

#include "tessera/optim/detail/adam_pass.h"

namespace tessera::optim {

void adam(const OptimizerConfig& config, const UpdateGroup& group) {
  detail::adam_update(config, group, detail::Decay::kInGradient);
}

Pace adam_pace(const OptimizerConfig& config, const UpdateGroup& group) {
  return detail::pace_of(config, group, detail::Decay::kInGradient);
}

}  // namespace tessera::optim
