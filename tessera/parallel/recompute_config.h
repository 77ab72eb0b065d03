// The section recompute of the configuration.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/config.h"

namespace tessera::parallel {

struct RecomputeConfig {
  std::string mode = "none";
  int64_t every = 0;
  void declare(config::Section& section);

  // Of mode block: whether the activations of a block, counted from 0, are
  // computed again.
  bool covers(int64_t block) const { return every == 0 || block % every == 0; }
};

}  // namespace tessera::parallel
