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
#include "tessera/parallel/tensor/tensor_config.h"

namespace tessera::parallel::tensor {

// Whether sequence parallelism has as many tokens for each rank of tp: of the
// 1/cp of a sequence that a rank of cp has.
bool cuts_evenly(int64_t seq_len, int64_t cp, int64_t tp);

// Whether heads and sequence divide. REQUIRES: a complete configuration.
void check(const models::ModelConfig& model, int64_t seq_len,
           const mesh::DeviceMesh& mesh, const TensorConfig& config);

// Around what the ranks of tp compute parts of. REQUIRES: `group` outlives it.
nn::Region region(const TensorConfig& config, comm::Group& group);

// Sets the layouts of the model's parameters over tp, experts' apart.
// REQUIRES: a model that is not materialised; a degree above 1.
void place(models::Model& model, const mesh::DeviceMesh& mesh,
           const TensorConfig& config);

// Sets what happens to activations. REQUIRES: `group` outlives the model and is
// the ranks along tp.
void apply(models::Model& model, const TensorConfig& config,
           comm::Group& group);

}  // namespace tessera::parallel::tensor
