// What a user asked for in vain.
#pragma once

#include <string>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/engine/run_config.h"

namespace tessera::engine {

// Keys that were set and have no effect, each with the reason, for a warning.
// REQUIRES: a completed configuration.
std::vector<std::string> without_effect(const RunConfig& config,
                                        const config::Provenance& origins);

}  // namespace tessera::engine
