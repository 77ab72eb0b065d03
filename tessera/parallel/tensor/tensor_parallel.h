// Tensor parallelism: the layers of a model cut over the ranks of tp, and
// with sequence parallelism the tokens between them too.
//
// Cut:    by roles (nn::Role): columns, such as q, k, v, gate and up, by output
//         features, heads whole; rows, such as o and down, by input features;
//         the embedding and the head by vocabulary entries, in chunks of
//         ceil(V/tp), the last ones shorter or empty. With fewer (key/value)
//         heads than ranks, neighbours hold the same one. Norms and the biases
//         of rows stay whole.
// Comm:   a block's two halves each have an all_reduce of (B, T, D) at their
//         end in forward, and at their beginning in backward. With sequence
//         parallelism the hidden states between them are (B, T/tp, D): an
//         all_gather at the beginning and a reduce_scatter at the end, each
//         the other in backward: the same bytes, 1/tp of the memory.
//         A norm over all heads of q or k sums its mean squares, (B, T), in
//         the same way in forward, and what it pulls in backward.
//         The loss: see vocabulary_loss.h.
// Errors: TS_CHECK_CONFIG, by check(), with the nearest values that fit.
// Source: Shoeybi et al. 2019, arXiv 1909.08053 (f, g); Korthikanti et al.
//         2022, arXiv 2205.05198 (g, g-bar).
#pragma once

#include <cstdint>

#include "tessera/comm/group.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/model.h"

namespace tessera::parallel::tensor {

struct TensorOptions {
  int64_t degree = 1;
  bool sequence_parallel = false;
};

// Whether heads and sequence divide. REQUIRES: a complete configuration.
void check(const models::ModelConfig& model, int64_t seq_len,
           const TensorOptions& options);

// Around what the ranks of tp compute parts of. REQUIRES: `group` outlives it.
nn::Region region(const TensorOptions& options, comm::Group& group);

// Sets the layouts of the model's parameters over tp, experts' apart.
// REQUIRES: a model that is not materialised; a degree above 1.
void place(models::Model& model, const TensorOptions& options);

// Sets what happens to activations. REQUIRES: `group` outlives the model and is
// the ranks along tp.
void apply(models::Model& model, const TensorOptions& options,
           comm::Group& group);

}  // namespace tessera::parallel::tensor
