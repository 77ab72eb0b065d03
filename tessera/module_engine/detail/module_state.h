// What a checkpoint has of a module's shards, and where one is found.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/group.h"
#include "tessera/wrappers/fully_shard.h"

namespace tessera::detail {

// This rank's part of a tensor of a parameter's shape. `local`: of the shard's.
checkpoint::TensorEntry entry_of(const std::string& name,
                                 const wrappers::ParameterShard& shard,
                                 const at::Tensor& local);
// The same on all ranks, of which the first writes it.
checkpoint::TensorEntry common_entry(const std::string& name,
                                     const at::Tensor& value, bool is_first);

// From FOLDER's newest good checkpoint, or from FOLDER where that is a step-N.
// The step; std::nullopt where there is none.
std::optional<int64_t> load_from(const std::string& folder,
                                 checkpoint::State& state, comm::Group& world,
                                 const checkpoint::LoadOptions& options = {});

}  // namespace tessera::detail
