// The section precision of the configuration.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "tessera/core/config.h"

namespace tessera::parallel {

struct PrecisionConfig {
  std::string compute = "fp32";
  std::string reduce = "auto";  // auto: fp32, or fp64 where that computes
  double loss_scale = 1.0;      // 0: found while training
  void declare(config::Section& section);

  // Whether gradients can be kept in the type that is asked for.
  void check() const;
  at::ScalarType compute_dtype() const;   // of parameters and activations
  at::ScalarType gradient_dtype() const;  // as they are kept and reduced
};

}  // namespace tessera::parallel
