// One pass over memory where a chain of tensor operations takes several.
//
// Shapes:  all tensors contiguous, of fp64, fp32, bf16 or fp16; rows of a GPU's
//          logits may lie further apart.
// Devices: the CPU; and norms, rotations, gates, losses and experts' rows on
//          GPUs: has_loops().
// Types:   arithmetic in fp64 for fp64, else in fp32.
// Bits:    they do not depend on the number of threads.
// Threads: work is shared out by core/parallel.h.
// Vectors: those of the processor (core/vectors.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace tessera::nn::detail {

// Whether those of such tensors have them.
bool has_loops(const at::Tensor& x);

// x: (..., D), weight: (D). Gives y = x / rms(x) * (offset + weight) (..., D)
// and 1 / rms(x) of its N rows, in fp32 or fp64.
std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    double eps, double offset);
// The gradients of x, with `past` added where it is defined, and weight.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& inverse_rms, double offset, const at::Tensor& past = {});

// x: (B, T, H, E); cos, sin: (T, E/2). `direction` 1 turns on, -1 back;
// `in_place` in x's memory.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin, double direction, bool in_place);

// What a gate is made: x sigmoid(x), or gelu_tanh(x).
enum class Gate { kSilu, kGelu };
// That, times up, of one shape.
at::Tensor glu(Gate kind, const at::Tensor& gate, const at::Tensor& up);
// The gradients of gate and up.
std::tuple<at::Tensor, at::Tensor> glu_backward(Gate kind,
                                                const at::Tensor& gradient,
                                                const at::Tensor& gate,
                                                const at::Tensor& up);

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
at::Tensor gelu_tanh(const at::Tensor& x);
at::Tensor gelu_tanh_backward(const at::Tensor& gradient, const at::Tensor& x);

// The sum of the rows' cross-entropies. logits: (N, V), which with a `scale`
// become the gradient of scale * sum; targets: (N) of int64, `ignored` is none.
// TS_CHECK on a target outside the vocabulary, which a GPU makes NaN of.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         int64_t ignored, std::optional<double> scale);

// y_t = sum over c of weights[t, c] rows[row[t, c]], where row is below R.
// rows: (R, D); row: (N, k) of int64; weights: (N, k) in fp64 for fp64, else in
// fp32, or undefined: each is 1. y: (N, D).
at::Tensor add_up_rows(const at::Tensor& rows, const at::Tensor& row,
                       const at::Tensor& weights);
// The gradients of rows, each of which is of one choice, and weights.
std::tuple<at::Tensor, at::Tensor> add_up_rows_backward(
    const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& row,
    const at::Tensor& weights);

// sums += x, of one shape; sums are of fp64 for fp64, else of fp32.
void add_to_wide(const at::Tensor& sums, const at::Tensor& x);

// table[ids[i]] += rows[i], in order. table: (R, D), ids: (N) of int64, rows:
// (N, D); what is wider than the table is rounded before it is added.
void add_rows(const at::Tensor& table, const at::Tensor& ids,
              const at::Tensor& rows);

}  // namespace tessera::nn::detail
