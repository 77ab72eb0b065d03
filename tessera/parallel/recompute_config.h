// The section recompute of the configuration.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/config.h"

namespace tessera::parallel {

struct RecomputeConfig {
  std::string mode = "none";
  int64_t every = 1;
  void declare(config::Section& section);

  // Whether the activations of a block, counted from 0, are computed again.
  bool covers(int64_t block) const {
    return mode == "block" && block % every == 0;
  }
};

}  // namespace tessera::parallel
