// How a run ended, in its summary.json, from whoever outlives its ranks: rank 0
// writes it, unless it is killed. Then it has only what is known of the end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "tessera/engine/run_config.h"

namespace tessera::train {

struct Ending {
  int exit_code = 0;  // of all ranks together
  std::string message = {};
  std::filesystem::file_time_type started;
};

// After a failure, where rank 0 left none, or one since it was `started` with
// another exit code. A file that cannot be written is a warning.
void note_end(const engine::RunConfig& config, int64_t world_size,
              const Ending& ending);

// Of a run that had done its `step` steps before, where it has none.
void note_nothing_to_do(const engine::RunConfig& config, int64_t world_size,
                        int64_t step);

}  // namespace tessera::train
