// The section tensor of the configuration.
#pragma once

#include "tessera/core/config.h"

namespace tessera::parallel::tensor {

struct TensorConfig {
  bool sequence_parallel = false;
  void declare(config::Section& section);
};

}  // namespace tessera::parallel::tensor
