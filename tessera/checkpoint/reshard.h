// A checkpoint in the files that another number of ranks would have written:
// one that is carried elsewhere, or many that are read at once. What it holds
// is the same, the optimizer's tensors included; any mesh loads either.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/comm/group.h"

namespace tessera::checkpoint {

// Reads `step_folder`, each rank a part of every tensor along dim 0, in chunks
// as FSDP2 cuts them, and saves it as FOLDER/step-N; returns the step.
// Memory: a rank holds its parts, all ranks together the checkpoint.
// Comm:   collective over `world`.
// Errors: as load() and save().
int64_t reshard(const std::string& step_folder, const std::string& folder,
                comm::Group& world);

}  // namespace tessera::checkpoint
