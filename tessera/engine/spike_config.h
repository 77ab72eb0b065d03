// The section spike of the configuration: what a loss far above those before it
// does.
//
// Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways",
//         2022, section 5.1: go back to a checkpoint about 100 steps before the
//         spike, and leave out 200 to 500 batches around it.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/config.h"

namespace tessera::engine {

struct SpikeConfig {
  std::string action = "warn";  // none | warn | rewind
  int64_t window = 128;         // losses that one is compared with
  double deviations = 6;
  int64_t skip_before = 100;  // batches
  int64_t skip_after = 100;
  int64_t max_rewinds = 5;  // times that a run goes back
  bool rewinds() const { return action == "rewind"; }
  void declare(config::Section& section);
};

}  // namespace tessera::engine
