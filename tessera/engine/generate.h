// Samples tokens from a model that lies on several ranks, in two ways.
//
// generate() is for a model that only writes: its stages lie along pp, their
// parts along tp, its experts along ep. Every rank caches keys and values of
// the heads and layers that it holds. The last stage draws, and tells all.
// generate_by_evaluations() is for a model that trains, on any mesh: a token is
// an evaluation of the whole text so far, by the program that validations run,
// which needs no memory that they do not. Replicas all compute the same text.
// Comm:   collective over the world, all ranks with the same arguments; a token
//         costs the strategies' part of a forward, hidden states (1, 1, D) from
//         stage to stage, an all_gather of (V) over tp, and a broadcast; by
//         evaluations those of one, with ZeRO-3 a gather of all parameters, and
//         over the world an all_reduce of (V) doubles and a broadcast.
// Errors: as models/generate.h.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/engine/rank_model.h"
#include "tessera/models/generate.h"

namespace tessera::engine {

// Ranks that no axis was given are tp's, or pp's where the model's heads do not
// divide by so many. Leaves alone what fits in no way: check_generation() says
// why.
void share_out_ranks(RunConfig& config, int64_t world_size);

// TS_CHECK_CONFIG, with the nearest that fits, where the mesh has an axis that
// one text cannot be shared out over.
void check_generation(const RunConfig& config, int64_t world_size);

// The same tokens on every rank. REQUIRES: check_generation().
std::vector<int64_t> generate(RankModel& model, comm::Communicator& ranks,
                              const std::vector<int64_t>& prompt,
                              const models::GenerateOptions& options,
                              const models::OnToken& on_token = nullptr);

// The same, for a text of at most `longest` tokens. REQUIRES: a mesh that fits
// samples of that length.
std::vector<int64_t> generate_by_evaluations(
    RankModel& model, comm::Communicator& ranks, int64_t longest,
    const std::vector<int64_t>& prompt, const models::GenerateOptions& options,
    const models::OnToken& on_token = nullptr);

}  // namespace tessera::engine
