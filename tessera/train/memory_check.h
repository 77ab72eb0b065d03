// Whether what ranks hold fits into the memory of their host, and what would
// need less where it does not, or a device has no more.
//
// Errors: TS_CHECK_CONFIG, but where a code is given.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

#include "tessera/core/error.h"
#include "tessera/engine/run_config.h"
#include "tessera/program/instruction.h"

namespace tessera::train {

// Ranks of one host, one behind the other.
struct HostRanks {
  int64_t first = 0;
  int64_t count = 1;
};

// That what these ranks hold at most (engine/memory_plan.h) is no more than
// `host_bytes` together; 0: unknown. The largest zero.prefetch that fits is
// named.
void check_memory(const engine::RunConfig& config, const HostRanks& ranks,
                  int64_t host_bytes,
                  program::Purpose purpose = program::Purpose::kTraining);

// "memory of the device: " and the line in which its allocator says so.
std::string out_of_memory_text(const c10::OutOfMemoryError& error);

// Ends the work of a rank whose device has no more memory, with the most that
// this rank has held, by kind, and what would need less.
[[noreturn]] void refuse_out_of_memory(
    const engine::RunConfig& config, const c10::OutOfMemoryError& error,
    program::Purpose purpose = program::Purpose::kTraining,
    ExitCode code = ExitCode::kConfig);

// What TESSERA_HOST_MEMORY says ("16G"), else what the host has; 0: unknown.
int64_t memory_of_host();

// What of their states lies in files.
int64_t bytes_in_files(const engine::RunConfig& config, const HostRanks& ranks);

// What checkpoint.local_every needs on the host of these ranks: two checkpoints
// while the second is written, of their files and, where there are other hosts,
// of copies, which are taken to be as many bytes.
int64_t local_checkpoint_bytes(const engine::RunConfig& config,
                               const HostRanks& ranks);

// Whether they share memory with all others.
bool share_memory(const engine::RunConfig& config, const HostRanks& ranks);

}  // namespace tessera::train
