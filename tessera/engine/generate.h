// Samples tokens from a model whose layers lie on several ranks: its stages
// along pp, their parts along tp, its experts along ep.
//
// Every rank caches keys and values of the heads and layers that it holds. The
// last stage draws, and tells all ranks.
// Comm:   collective over the world, all ranks with the same arguments; a token
//         costs the strategies' part of a forward, hidden states (1, 1, D) from
//         stage to stage, an all_gather of (V) over tp, and a broadcast.
// Errors: as models/generate.h.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/engine/rank_model.h"
#include "tessera/models/generate.h"

namespace tessera::engine {

// TS_CHECK_CONFIG, with the nearest that fits, where the mesh has an axis that
// one text cannot be shared out over.
void check_generation(const RunConfig& config, int64_t world_size);

// The same tokens on every rank. REQUIRES: check_generation().
std::vector<int64_t> generate(RankModel& model, comm::Communicator& ranks,
                              const std::vector<int64_t>& prompt,
                              const models::GenerateOptions& options,
                              const models::OnToken& on_token = nullptr);

}  // namespace tessera::engine
