// What can be found wrong before any rank starts, and what ranks share.
//
// Errors: TS_CHECK_CONFIG (78) for the configuration and what it names: text
//         that is missing or empty, a tokenizer that does not fit the model, no
//         room on the disk for checkpoints, none in memory; TS_CHECK_IO (74)
//         for files that are damaged.
#pragma once

#include <string>

#include "tessera/engine/run_config.h"
#include "tessera/train/memory_check.h"

namespace tessera::train {

// Makes the run folder, checks disk and memory, prepares the data where a rank
// of this host reads it (engine/reader.h). Done once a host, before its ranks
// start. `resume` is TrainOptions::resume. REQUIRES: a completed configuration.
void preflight(const engine::RunConfig& config, const HostRanks& ranks,
               const std::string& resume = "auto");

// That the files which data.train, data.valid and TESSERA_COMM_TABLE name are
// there, and that data.tokenizer and data.chat_template can be read.
void check_paths(const engine::RunConfig& config);

// What a dry run shows (plan_text.h), of a plan that could be carried out.
std::string describe_plan(const engine::RunConfig& config);

}  // namespace tessera::train
