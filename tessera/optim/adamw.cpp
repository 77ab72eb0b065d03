#include "tessera/optim/adamw.h"

#include "tessera/optim/detail/adam_pass.h"

namespace tessera::optim {

void adamw(const OptimizerConfig& config, const UpdateGroup& group) {
  detail::adam_update(config, group, detail::Decay::kDecoupled);
}

Pace adamw_pace(const OptimizerConfig& config, const UpdateGroup& group) {
  return detail::pace_of(config, group, detail::Decay::kDecoupled);
}

}  // namespace tessera::optim
