// Expert parallelism: the experts of a model shared out over ranks, in their
// own view of the mesh (mesh::DeviceMesh).
//
// Cut:    rank r along ep holds experts [r E/ep, (r+1) E/ep) of every layer;
//         with etp = tp each of them is cut over tp as an MLP is: gate and up
//         by output features, down by input features. The gate is whole on
//         every rank.
// Tokens: the ranks of ep and etp = 1 each route their own. Where the ranks of
//         tp hold the same tokens (no sequence parallelism) each routes a piece
//         of every sample's. With etp = tp all of them route and send all, to
//         their parts of the experts.
// Comm:   over ep of each layer an all_gather of E counts, and an all_to_all of
//         rows each way, again in backward, or as many as there are chunks;
//         where a Balance is asked for an all_reduce of (B, E) over the ranks
//         that share samples, or of (E) over all that have other tokens of the
//         micro-batch; and with a capacity an all_gather of choices and places,
//         (B, T, k + 1), or where experts choose of scores and places,
//         (B, T, E + 1). A rank whose experts get no row calls the same. Along
//         tp with etp = tp what an MLP does: an all_reduce of (B, T, D) at the
//         end, and in backward at the beginning, or with sequence parallelism
//         an all_gather and a reduce_scatter. With etp = 1 an all_gather of
//         (B, T, D) in their places, or with sequence parallelism nothing.
// Errors: TS_CHECK_CONFIG, by check(), with the nearest values that fit.
// Source: Lepikhin et al. 2021, arXiv 2006.16668 (all_to_all); Liu et al. 2025,
//         arXiv 2504.14960 (the view of its own).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/layout.h"
#include "tessera/models/model.h"

namespace tessera::parallel::expert {

// What other strategies do, which experts follow.
struct ExpertOptions {
  // Along which ranks have other tokens of the same samples, whatever tp does.
  std::vector<mesh::Axis> sample_axes = {};
  bool sequence_parallel = false;
  nn::Region region = {};       // around what the ranks of tp compute parts of
  int64_t dispatch_chunks = 0;  // see DispatchOptions
};

// Along which ranks have other tokens of a micro-batch of all ranks: those of
// its samples, and other samples.
std::vector<mesh::Axis> axes_of_batch(std::vector<mesh::Axis> sample_axes);

// Whether experts divide by ep, and each takes a token of a sample. REQUIRES: a
// complete configuration.
void check(const models::ModelConfig& model, int64_t seq_len,
           const mesh::DeviceMesh& mesh);

// Sets the layouts of the experts and their gates. REQUIRES: a model that is
// not materialised.
void place(models::Model& model, const mesh::DeviceMesh& mesh);

// Sets how tokens get to the experts. REQUIRES: `ranks` outlives the model.
void apply(models::Model& model, const ExpertOptions& options,
           const mesh::DeviceMesh& mesh, comm::Communicator& ranks);

// Ranks that hold the same tokens go on with a piece each, and all_gather what
// these became, as in backward the gradients. The group must outlive the graph.
nn::TokenSplit split_over(comm::Group& ranks);

// The experts that are here, of rows (N, D): those of the first expert, then of
// the next, splits[e] of them.
using RunExperts = std::function<at::Tensor(
    const at::Tensor& rows, const std::vector<int64_t>& splits)>;

// The experts of each part in which rows go to a rank with so many: `chunks` at
// most, each of as many, the last of what is left.
std::vector<mesh::Range> expert_chunks(int64_t experts, int64_t chunks);

struct DispatchOptions {
  // 0: rows go all at once, and the rank waits for them. Else they go in the
  // parts of expert_chunks(): while one travels, the rank computes with those
  // before it.
  int64_t chunks = 0;
  // With chunks: what the rank does while the first travels.
  std::function<void()> beside = {};
};

// Takes rows (N, D), `counts` (E) of which go to each expert in turn, to where
// the experts are, and brings back what these make of them: over the ranks of
// `group`, of n, rank r has the experts [r E/n, (r+1) E/n). Rows behind those
// go nowhere. Chunks change no bit. The group must outlive the graph.
at::Tensor dispatch(const at::Tensor& rows, const at::Tensor& counts,
                    const RunExperts& run, comm::Group& group,
                    const DispatchOptions& options = {});

}  // namespace tessera::parallel::expert
