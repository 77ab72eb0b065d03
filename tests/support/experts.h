// The part of a model that its experts are.
#pragma once

#include "tessera/models/model.h"

namespace tessera::models {

inline int64_t num_expert_parameters(const ModelConfig& config) {
  int64_t total = 0;
  for (const auto& each : nn::parameters_of(*make_model(config))) {
    const auto& layout = each.spec->layout;
    if (layout.is_of_expert()) total += layout.global_numel();
  }
  return total;
}

}  // namespace tessera::models
