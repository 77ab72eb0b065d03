// Random tokens to train on where what is learned does not matter.
#pragma once

#include <cstdint>

#include "tessera/data/dataset.h"
#include "tessera/engine/run_config.h"

namespace tessera::verify {

// Samples first .. first + count - 1 of a step, the same on every mesh.
data::Batch random_batch(const engine::RunConfig& config, int64_t step,
                         int64_t first, int64_t count);

}  // namespace tessera::verify
