// Expert parallelism: the experts of a decoder shared out over ranks, in their
// own view of the mesh (mesh::DeviceMesh).
//
// Cut:    rank r along ep holds experts [r E/ep, (r+1) E/ep) of every layer;
//         with etp = tp each of them is cut over tp as an MLP is: gate and up
//         by output features, down by input features. The gate is whole on
//         every rank.
// Tokens: the ranks of ep and etp = 1 each route their own. Where the ranks of
//         tp hold the same tokens (no sequence parallelism) each sends a share
//         of them. With etp = tp all of them send all, to their parts of the
//         experts.
// Comm:   nn::ExpertShard's, over ep. Along tp what an MLP does: with etp = tp,
//         or without sequence parallelism, an all_reduce of (B, T, D) at the
//         end, and in backward at the beginning; with both an all_gather and a
//         reduce_scatter; with sequence parallelism and etp = 1 nothing.
// Errors: TS_CHECK_CONFIG, by check(), with the nearest values that fit.
// Source: Lepikhin et al. 2021, arXiv 2006.16668 (all_to_all); Liu et al. 2025,
//         arXiv 2504.14960 (the view of its own).
#pragma once

#include <cstdint>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/decoder.h"

namespace tessera::parallel::expert {

// What tensor parallelism does, which experts follow.
struct ExpertOptions {
  bool sequence_parallel = false;
  nn::Region region = {};  // around what the ranks of tp compute parts of
};

// Whether experts divide by ep. REQUIRES: a complete configuration.
void check(const models::ModelConfig& model, int64_t ep);

// Sets the layouts of the experts and their gates, and how tokens get to them.
// REQUIRES: a decoder that is not materialised; `ranks` outlives it.
void apply(models::Decoder& decoder, const ExpertOptions& options,
           const mesh::DeviceMesh& mesh, comm::Communicator& ranks);

}  // namespace tessera::parallel::expert
