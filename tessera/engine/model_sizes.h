// Sizes of the model that model.from names.
#pragma once

#include "tessera/core/config.h"
#include "tessera/engine/run_config.h"

namespace tessera::engine {

// Where model.from is set: takes the sizes in its config.json. A size that was
// also given as a key (`origins` tells) must be the same there; but
// model.max_seq, where positions are not learned, and model.rope_scaling are
// then the user's.
void read_model_folder(RunConfig& config, const config::Provenance& origins);
// The same of sizes that are known.
void take_sizes(RunConfig& config, const models::ModelConfig& folder,
                const config::Provenance& origins);

}  // namespace tessera::engine
