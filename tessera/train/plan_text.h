// A run's plan, for people: sizes of model, batch, memory and checkpoint, and
// who is in which group. Memory of the rank that needs the most, as facts have
// it (engine/memory_plan.h).
#pragma once

#include <string>

#include "tessera/engine/run_config.h"

namespace tessera::train {

// REQUIRES: a completed configuration.
std::string plan_text(const engine::RunConfig& config);

}  // namespace tessera::train
