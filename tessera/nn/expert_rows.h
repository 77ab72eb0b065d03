// Rows of tokens in the order of their experts, and what experts make of them
// added up for each token.
//
//   row_r = x_t of its token t;  y_t = sum over the choices c of t that have a
//   row of w_(t, c) row_(t, c), in the order of choices
//
// Shapes: x, y: (N, D); rows: (R, D); weights: (N, k).
// Types:  sums in fp32, or fp64 for fp64; weights are of that type.
// Bits:   they do not depend on the number of threads.
// Derivatives: also second ones, by LibTorch's operators.
// Kernel: one pass over memory, forward and backward, on the CPU and on GPUs;
//         elsewhere, and without `expert_rows` (kernel_choice.h), LibTorch's
//         operators.
// Comm:   none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::nn {

struct RowOrder {
  at::Tensor choice;  // (R): of each row, which of the N k choices it is of
  at::Tensor token;   // (R): and of which token
  at::Tensor row;     // (N, k): of each choice its row; R or more: it has none
};

// How often each of 0 .. kinds - 1 occurs: (kinds) of int64.
at::Tensor counts_of(const at::Tensor& numbers, int64_t kinds);

// Of tokens whose choices go to these experts (N, k), each by its number: one
// expert's rows, in the order of choices, behind the other's; the first `most`
// of them.
RowOrder order_of_rows(const at::Tensor& experts_of, int64_t most);

// For autograd: (N, D) -> (R, D).
at::Tensor rows_of_tokens(const at::Tensor& x, const RowOrder& order);

// For autograd, of the first rows, as many as are given: (R', D) -> (N, D).
at::Tensor tokens_of_rows(const at::Tensor& rows, const at::Tensor& weights,
                          const RowOrder& order);

}  // namespace tessera::nn
