// Causal attention piece by piece: a sequence is cut into equal pieces, and of
// queries and keys any pieces may be here.
//
// A piece of queries sees the pieces of keys before it whole, its own causally,
// and none behind it. What each pair gives is merged by its log-sum-exp; in the
// backward every pair is given the merged output and log-sum-exp, which makes
// its share exact.
//
// Shapes: q, out: (B, n S, H, E) of n pieces of S tokens; k, v: (B, m S, K, E),
//         K divides H; log-sum-exp: (B, H, n S).
// Types:  merged and summed in fp32, or fp64 for fp64.
// Kernel: LibTorch's flash attention for the CPU, forward and backward.
// Comm:   none.
// Source: Liu et al. 2023, arXiv 2310.01889; Dao et al. 2022, arXiv 2205.14135.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::parallel::context {

using Pieces = std::vector<int64_t>;  // their places in the sequence

// What the queries have seen so far.
struct Seen {
  at::Tensor out;  // undefined: nothing
  at::Tensor lse;
};

void attend(const at::Tensor& q, const Pieces& q_pieces, const at::Tensor& k,
            const at::Tensor& v, const Pieces& k_pieces, Seen& seen);

// Adds the shares of these keys to dq, dk and dv, which have the wide type.
// `out` and `seen.lse`: of all keys, also of those that are not here.
struct AttentionGradients {
  at::Tensor dq, dk, dv;
};
void attend_backward(const at::Tensor& gradient, const at::Tensor& q,
                     const Pieces& q_pieces, const at::Tensor& k,
                     const at::Tensor& v, const Pieces& k_pieces,
                     const at::Tensor& out, const at::Tensor& lse,
                     AttentionGradients& sums);

}  // namespace tessera::parallel::context
