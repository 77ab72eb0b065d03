// Causal attention piece by piece: a sequence is cut into equal pieces, and of
// queries and keys any pieces may be here.
//
// A piece of queries sees the pieces of keys before it whole, its own causally,
// and none behind it. What each pair gives is merged by its log-sum-exp; in the
// backward every pair is given the merged output and log-sum-exp, which makes
// its share exact.
// Documents: where a sample is several, one behind the other, a token sees its
//         own alone: pairs are then of each document's part of two pieces, and
//         what no token sees costs nothing.
// Window: of W tokens: a token sees itself and the W - 1 before it. Of pairs of
//         pieces the near ones are seen whole and the far ones, which cost
//         nothing, not at all; between them lie those that are masked.
//
// Shapes: q, out: (B, n S, H, E) of n pieces of S tokens; k, v: (B, m S, K, E),
//         K divides H; log-sum-exp: (B, H, n S). starts: (B, T) of int64 on the
//         CPU, T the whole sequence's: where the document of each token begins;
//         undefined: a sample is one document.
// Types:  merged and summed in fp32, or fp64 for fp64.
// Kernel: LibTorch's flash attention for the CPU, forward and backward; with
//         dropout and on the edge of a window, which it has not,
//         flash_attention.h's. Elsewhere composed_attention.h's.
// Comm:   none.
// Source: Liu et al. 2023, arXiv 2310.01889; Dao et al. 2022, arXiv 2205.14135;
//         documents: Zhao et al. 2024, arXiv 2402.13991 (intra-document causal
//         masking).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/nn/dropout.h"

namespace tessera::nn {

// What the queries see of the keys before them.
struct Sight {
  // (B, T of the whole sequence): see above.
  at::Tensor document_starts = {};
  Dropout dropout = {};
  int64_t window = 0;  // 0: all
};

// Of what a window leaves a run of queries of keys at or before them.
enum class Within { kNone, kPart, kAll };
struct Stretch {
  int64_t begin, length;  // in the sequence
};
Within within_window(const Stretch& queries, const Stretch& keys,
                     int64_t window);

using Pieces = std::vector<int64_t>;  // their places in the sequence

// What the queries have seen so far.
struct Seen {
  at::Tensor out;  // undefined: nothing
  at::Tensor lse;
};

void attend(const at::Tensor& q, const Pieces& q_pieces, const at::Tensor& k,
            const at::Tensor& v, const Pieces& k_pieces, const Sight& sight,
            Seen& seen);

// Adds the shares of these keys to dq, dk and dv, which have the wide type.
// `out` and `lse`: of all keys, also of those that are not here.
struct AttentionGradients {
  at::Tensor dq, dk, dv;
};
void attend_backward(const at::Tensor& gradient, const at::Tensor& q,
                     const Pieces& q_pieces, const at::Tensor& k,
                     const at::Tensor& v, const Pieces& k_pieces,
                     const Sight& sight, const at::Tensor& out,
                     const at::Tensor& lse, AttentionGradients& sums);

// Where all keys that the queries see are here. Differentiable once.
at::Tensor piece_attention(const at::Tensor& q, const Pieces& q_pieces,
                           const at::Tensor& k, const at::Tensor& v,
                           const Pieces& k_pieces, const Sight& sight);

}  // namespace tessera::nn
