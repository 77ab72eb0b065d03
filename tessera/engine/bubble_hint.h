// Whether a step has micro-batches enough.
#pragma once

#include <string>

#include "tessera/engine/run_config.h"

namespace tessera::engine {

// Of a pipeline with fewer micro-batches than twice its stages: how much of a
// step is bubble where stages are alike and a backward takes two forwards, and
// what would halve it; "" for others. REQUIRES: a completed configuration.
std::string bubble_hint(const RunConfig& config);

}  // namespace tessera::engine
