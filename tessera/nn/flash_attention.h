// Causal attention on the CPU in blocks, forward and backward, by our own loops
// (kernels/attention.inc): scores are never all in memory.
//
// Forward:  queries are shown one block of keys after the other. Of what they
//           have seen they keep m, the largest score s = q k / sqrt(E), and
//           l = sum e^(s - m), O = sum e^(s - m) v, which a larger m shrinks;
//           behind the last block out = O / l, and lse = m + log l is kept.
// Backward: from P = e^(s - lse): dV = P^T dO, dP = dO V^T,
//           dS = P (dP - sum over E of dO out), dQ = dS K / sqrt(E),
//           dK = dS^T Q / sqrt(E). The products are summed block by block.
// Causal:   blocks above the diagonal are passed over, and most tiles that are
//           above it in the blocks on it.
// Window:   of W tokens: query i sees the keys j of i - W < j <= i. Blocks that
//           no query sees are passed over, forward and backward: of T tokens
//           T W pairs are computed in place of T^2 / 2.
// Dropout:  with D, 0 or 1 / (1 - rate), as nn/dropout.h has it, which is made
//           where it is used: out = sum D P v, dV = (D P)^T dO,
//           dP = D (dO V^T); lse is without.
// Shapes:   q, out: (B, T, H, E); k, v: (B, T, K, E), K divides H; by strides,
//           but E is contiguous; lse: (B, H, T). out is contiguous.
// Types:    fp64, fp32, bf16 and fp16; exponents and sums in fp64 for fp64,
//           else in fp32. fp16 is widened, and so is bf16, but where the
//           processor has arithmetic for it: there it is multiplied as it is,
//           and P and dS are rounded to it.
// Bits:     they do not depend on the number of threads: a thread has all
//           queries that read a head of k and v.
// Source:   Dao et al. 2022, arXiv 2205.14135; Dao 2023, arXiv 2307.08691.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "tessera/nn/dropout.h"

namespace tessera::nn {

struct FlashShape {
  int64_t samples, tokens, heads, kv_heads, width;
  bool drops = false;
};

// Differentiable once. REQUIRES: takes_flash(q, k, v).
at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const Dropout& dropout = {},
                           int64_t window = 0);
bool takes_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
// For whoever attends by a mask: which keys each of so many queries sees, of
// the last `window`, or with 0 of all before it. (T, T) of bool.
at::Tensor seen_keys(int64_t tokens, int64_t window,
                     const at::TensorOptions& options);

// A run of queries over one of keys, and where they begin in the sequence.
struct FlashRuns {
  bool is_causal = true;  // of the same tokens; else every query sees all keys
  Dropout dropout = {};
  int64_t first_query = 0, first_key = 0;
  int64_t window = 0;  // 0: none
};
// (out, lse), without a graph; lse (B, H, T) may be a part along T. A query
// that the window leaves no key has out 0 and an lse of -1e30.
std::tuple<at::Tensor, at::Tensor> flash_forward(const at::Tensor& q,
                                                 const at::Tensor& k,
                                                 const at::Tensor& v,
                                                 const FlashRuns& runs);
// (dq, dk, dv). `out` and `lse`: of all keys that the queries see.
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    const FlashRuns& runs);

// Numbers of the wide type that it allocates while it runs, for all threads.
int64_t flash_scratch(const FlashShape& shape, int64_t threads);
int64_t flash_backward_scratch(const FlashShape& shape, int64_t threads);

}  // namespace tessera::nn
