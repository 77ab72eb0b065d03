// A checkpoint in the files that another number of ranks would have written:
// one that is carried elsewhere, or many that are read at once. What it holds
// is the same, the optimizer's tensors included; any mesh loads either.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::checkpoint {

// Writes FOLDER/step-N with a file for each of so many ranks, who have a part
// of every tensor along dim 0, in chunks as FSDP2 cuts them; returns the step.
// By one process, a part at a time: they need not fit into memory together.
// `extra`: in place of the source's.
// Errors: TS_CHECK_IO with file and tensor, also where the source is bad; no
//         step-N is there then, and who writes to FOLDER next removes the rest.
int64_t reshard(const std::string& step_folder, const std::string& folder,
                int64_t ranks, const std::optional<std::string>& extra = {});

}  // namespace tessera::checkpoint
