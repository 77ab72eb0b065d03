// The number types of a run.
#pragma once

#include <c10/core/ScalarType.h>

#include "tessera/core/error.h"
#include "tessera/engine/run_config.h"

namespace tessera::engine {

// precision.compute, of weights and activations.
inline c10::ScalarType compute_dtype(const RunConfig& config) {
  const std::string& name = config.precision.compute;
  if (name == "fp64") return c10::kDouble;
  if (name == "bf16") return c10::kBFloat16;
  TORCH_INTERNAL_ASSERT(name == "fp32", "precision.compute ", name);
  return c10::kFloat;
}

// precision.reduce, of gradients; auto: fp32, or fp64 with weights in it.
inline c10::ScalarType gradient_dtype(const RunConfig& config) {
  if (config.precision.reduce == "bf16") return c10::kBFloat16;
  const auto compute = compute_dtype(config);
  return compute == c10::kBFloat16 ? c10::kFloat : compute;
}

}  // namespace tessera::engine
