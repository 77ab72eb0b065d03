// Collectives that autograd follows, in conjugate pairs: the backward of one is
// the forward of the other. `a_with_b`: forward a, backward b.
//
// Which one: the gradient of a tensor that every rank holds whole, used
//   differently by each, is the sum of theirs (identity_with_all_reduce); the
//   sum of what ranks computed, used alike by all, passes its gradient on as it
//   is (all_reduce_with_identity).
// Shapes:  n = group.size(); "piece" is 1/n of dim `dim`, piece r is rank r's.
//          Where it says so pieces may be shorter, those behind others alone:
//          of a dim of N, [r c, (r + 1) c) within it, with c = ceil(N / n).
// Comm:    the verbs named, on `group`, awaited but where it says otherwise; of
//          a group of one rank none.
// Errors:  TS_CHECK where `dim` does not divide by n and pieces are equal, or
//          is not this rank's piece, and in a backward with create_graph; and
//          the group's own.
// Threads: `group` must outlive the graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
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
// Pieces may be shorter; `whole`: N, where they do. Shorter ones travel padded.
at::Tensor all_gather_with_split(const at::Tensor& x, int64_t dim, Group& group,
                                 std::optional<int64_t> whole = {});
at::Tensor split_with_all_gather(const at::Tensor& x, int64_t dim,
                                 Group& group);

// Rows of dim 0 to and from each rank; the backward sends them home. Empty
// splits: equal parts.
at::Tensor all_to_all(const at::Tensor& x, Group& group,
                      const std::vector<int64_t>& output_splits = {},
                      const std::vector<int64_t>& input_splits = {});

// The same in two calls: rows travel while the rank computes between them, and
// so do their gradients in backward. Both go through the group, also of one
// rank. REQUIRES: what the first gives is for the second alone, once, and until
// then nobody reads it: neither the rows nor, in backward, their gradient is
// there. One that is dropped brings its rows to nobody.
struct Journey;
struct Travelling {
  at::Tensor rows;  // not there yet
  std::shared_ptr<Journey> journey;
};
Travelling start_all_to_all(const at::Tensor& x, Group& group,
                            const std::vector<int64_t>& output_splits,
                            const std::vector<int64_t>& input_splits);
at::Tensor finish_all_to_all(const Travelling& rows);

}  // namespace tessera::comm
