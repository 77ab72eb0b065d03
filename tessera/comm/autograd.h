// Collectives that autograd follows, in conjugate pairs: the backward of one is
// the forward of the other. `a_with_b`: forward a, backward b.
//
// Which one: the gradient of a tensor that every rank holds whole, used
//   differently by each, is the sum of theirs (identity_with_all_reduce); the
//   sum of what ranks computed, used alike by all, passes its gradient on as it
//   is (all_reduce_with_identity).
// Shapes:  n = group.size(); "piece" is 1/n of dim `dim`, piece r is rank r's.
// Comm:    the verbs named, on `group`, awaited; of a group of one rank none.
// Errors:  TS_CHECK where `dim` does not divide by n, and the group's own.
// Threads: `group` must outlive the graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/group.h"

namespace torch::autograd {
struct AutogradContext;
}  // namespace torch::autograd

namespace tessera::comm {

// What a Function of one's own keeps of its group until the backward.
void save_group(torch::autograd::AutogradContext* context, Group& group);
Group& saved_group(torch::autograd::AutogradContext* context);

// Megatron-LM's f and g (arXiv 1909.08053).
at::Tensor identity_with_all_reduce(const at::Tensor& x, Group& group);
at::Tensor all_reduce_with_identity(const at::Tensor& x, Group& group);

// x: a piece -> whole, another use of it on each rank; and back, as a sum
// (sequence parallelism, arXiv 2205.05198).
at::Tensor all_gather_with_reduce_scatter(const at::Tensor& x, int64_t dim,
                                          Group& group);
at::Tensor reduce_scatter_with_all_gather(const at::Tensor& x, int64_t dim,
                                          Group& group);

// x: a piece -> whole, used alike by every rank, with the same gradients; and
// back: x is whole and the same on every rank, which goes on with its piece.
at::Tensor all_gather_with_split(const at::Tensor& x, int64_t dim,
                                 Group& group);
at::Tensor split_with_all_gather(const at::Tensor& x, int64_t dim,
                                 Group& group);

// Rows of dim 0 to and from each rank; the backward sends them home. Empty
// splits: equal parts.
at::Tensor all_to_all(const at::Tensor& x, Group& group,
                      const std::vector<int64_t>& output_splits = {},
                      const std::vector<int64_t>& input_splits = {});

}  // namespace tessera::comm
