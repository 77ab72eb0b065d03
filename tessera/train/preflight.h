// What can be found wrong before any rank starts, and what ranks share.
//
// Errors: TS_CHECK_CONFIG (78) for the configuration and what it names: text
//         that is missing or empty, a tokenizer that does not fit the model, no
//         room on the disk for checkpoints, none in memory; TS_CHECK_IO (74)
//         for files that are damaged.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

#include "tessera/engine/run_config.h"
#include "tessera/program/instruction.h"

namespace tessera::train {

// Ranks of one host, one behind the other.
struct HostRanks {
  int64_t first = 0;
  int64_t count = 1;
};

// Makes the run folder, checks disk and memory, prepares the data where a rank
// of this host reads it (engine/reader.h). Done once a host, before its ranks
// start. `resume` is TrainOptions::resume. REQUIRES: a completed configuration.
void preflight(const engine::RunConfig& config, const HostRanks& ranks,
               const std::string& resume = "auto");

// That what these ranks hold at most (engine/memory_plan.h) is no more than
// `host_bytes` together; 0: unknown. The largest zero.prefetch that fits is
// named.
void check_memory(const engine::RunConfig& config, const HostRanks& ranks,
                  int64_t host_bytes,
                  program::Purpose purpose = program::Purpose::kTraining);

// "memory of the device: " and the line in which its allocator says so.
std::string out_of_memory_text(const c10::OutOfMemoryError& error);

// Ends the work of a rank whose device has no more memory: TS_CHECK_CONFIG,
// with the most that this rank has held, by kind, and what would need less.
[[noreturn]] void refuse_out_of_memory(
    const engine::RunConfig& config, const c10::OutOfMemoryError& error,
    program::Purpose purpose = program::Purpose::kTraining);

// What TESSERA_HOST_MEMORY says ("16G"), else what the host has; 0: unknown.
int64_t memory_of_host();

// That the files which data.train, data.valid and TESSERA_COMM_TABLE name are
// there.
void check_paths(const engine::RunConfig& config);

// What a dry run shows: sizes of model, batch, memory and checkpoint. Memory of
// the rank that needs the most, as facts have it (engine/memory_plan.h).
std::string describe_plan(const engine::RunConfig& config);

}  // namespace tessera::train
