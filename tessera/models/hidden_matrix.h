// Which parameters of a model are hidden matrices: the weights of its blocks
// that multiply, one by one or stacked by experts. No embedding, head, norm or
// bias is one.
#pragma once

#include <cstdint>

#include "tessera/nn/parameter.h"

namespace tessera::models {

// `num_units`: the model's; the first embeds, the last has the head.
inline bool is_hidden_matrix(const nn::ParameterSpec& spec, int64_t num_units) {
  const size_t dims = spec.layout.global_shape().size();
  const int64_t unit = spec.units.empty() ? 0 : spec.units.front();
  return unit > 0 && unit < num_units - 1 &&
         dims == (spec.role.of_experts ? 3U : 2U);
}

}  // namespace tessera::models
