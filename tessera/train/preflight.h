// What can be found wrong before any rank starts, and what ranks share.
//
// Errors: TS_CHECK_CONFIG (78) for the configuration and what it names: text
//         that is missing or empty, a tokenizer that does not fit the model, no
//         room on the disk for checkpoints; TS_CHECK_IO (74) for files that
//         are damaged.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/engine/run_config.h"

namespace tessera::train {

// Makes the run folder, prepares the data in it, checks the disk. Done once, by
// whoever starts the ranks. REQUIRES: a completed configuration.
void preflight(const engine::RunConfig& config);

// That the files which data.train, data.valid and TESSERA_COMM_TABLE name are
// there.
void check_paths(const engine::RunConfig& config);

// What a dry run shows: sizes of model, batch, memory and checkpoint. Memory of
// the rank that needs the most, as facts have it (engine/memory_plan.h).
std::string describe_plan(const engine::RunConfig& config);

}  // namespace tessera::train
