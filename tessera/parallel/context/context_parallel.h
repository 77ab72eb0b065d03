// Context parallelism: the tokens of a sequence cut over the ranks of cp.
//
// Cut:    2 cp equal pieces; rank r has pieces r and 2 cp - 1 - r (zigzag), so
//         that causal attention costs every rank the same.
// Comm:   of a layer with keys and values of S bytes on a rank, c = cp:
//         ring:      forward (c - 1) S to the next rank, backward (c - 1) S and
//                    c S of their gradients
//         allgather: all_gather of S forward, reduce_scatter backward
//         ulysses:   all_to_all of q, k, v and the output, each way; every rank
//                    then has all tokens of 1/c of the heads. Fewer key/value
//                    heads than ranks are repeated.
// Errors: TS_CHECK_CONFIG, by check(), with the nearest values that fit.
// Source: Liu et al. 2023, arXiv 2310.01889 (ring); Jacobs et al. 2023, arXiv
//         2309.14509 (ulysses); Llama 3, arXiv 2407.21783, 3.3.2 (allgather).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/comm/group.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/model.h"
#include "tessera/nn/piece_attention.h"
#include "tessera/parallel/context/context_config.h"

namespace tessera::parallel::context {

// Whether sequence and heads divide, which the ranks of tp share out.
// REQUIRES: a complete configuration.
void check(const models::ModelConfig& model, int64_t seq_len,
           const mesh::DeviceMesh& mesh, const ContextConfig& config);

// Refuses what adds one token at a time.
void check_generation(const mesh::Degrees& mesh);

// Each rank sees every parameter through other tokens: gradients are summed.
// REQUIRES: a model that is not materialised.
void place(models::Model& model);

using nn::Pieces;
// The pieces of the sequence that a rank of cp has.
Pieces pieces_of(int64_t rank, int64_t degree);
// Those of rank 0, then of rank 1, and so on.
Pieces pieces_of_all(int64_t degree);

// T -> T / cp.
int64_t local_length(int64_t tokens, const mesh::DeviceMesh& mesh);
// (B, T) -> the rank's (B, T / cp). With degree 1 the tensor itself.
at::Tensor local_tokens(const at::Tensor& tokens, int64_t rank, int64_t degree);

// Sets where the model's tokens stand and how they see each other. `group`: the
// ranks along cp; outlives the model.
void apply(models::Model& model, const ContextConfig& config,
           comm::Group& group);

// Causal attention over the whole sequence, of this rank's part of it.
at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& v, const nn::Sight& sight,
                          comm::Group& group);
at::Tensor gathered_attention(const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const nn::Sight& sight,
                              comm::Group& group);
at::Tensor ulysses_attention(const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v, const nn::Sight& sight,
                             comm::Group& group);

}  // namespace tessera::parallel::context
