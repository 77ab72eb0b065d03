// Attention of one run of queries over one of keys by operators of LibTorch
// alone, with its log-sum-exp: for devices that have no loops of
// nn's for attention.
//
// Shapes: q, out: (B, H, T, E); k, v: (B, K, S, E), K divides H; lse:
//         (B, H, T).
// Types:  scores, exponents and sums in the wide type (wide_type.h); out is of
//         it too.
// Dropout: as flash_attention.h has it.
// Memory: the scores of some samples, and as much again: see
//         samples_at_once().
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "tessera/nn/flash_attention.h"

namespace tessera::nn {

// (out, lse), without a graph. A query that the window leaves no key has out 0
// and an lse of -1e30.
std::tuple<at::Tensor, at::Tensor> composed_attention(const at::Tensor& q,
                                                      const at::Tensor& k,
                                                      const at::Tensor& v,
                                                      const FlashRuns& runs);
// (dq, dk, dv), of the wide type. `out` and `lse`: of all keys that the queries
// see.
std::tuple<at::Tensor, at::Tensor, at::Tensor> composed_attention_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    const FlashRuns& runs);

// Samples whose scores are there at once, of `scores` each: as many as have
// 2^26 together, but one at least.
int64_t samples_at_once(int64_t samples, int64_t scores);

}  // namespace tessera::nn
