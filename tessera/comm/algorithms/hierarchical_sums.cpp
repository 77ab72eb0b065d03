#include "tessera/comm/algorithms/hierarchical_collectives.h"

#include <ATen/ops/zeros.h>

#include "tessera/comm/base/partial_sums.h"

namespace tessera::comm::algorithms {
namespace {

// A mean is a sum until it is finished.
ReduceOp sums_of(ReduceOp op) {
  return op == ReduceOp::kMean ? ReduceOp::kSum : op;
}

}  // namespace

at::Tensor Hierarchical::ordered_partial(
    const at::Tensor& input, const std::vector<int64_t>& order) const {
  const Elements values = elements_of(input);
  const auto size = static_cast<int64_t>(order.size());
  const int64_t piece = values.numel / size;
  at::Tensor partial = empty_of(values.numel, partial_dtype(values.dtype));
  const Elements to = elements_of(partial);
  for (int64_t i = 0; i < size; ++i) {
    begin_partial(values.part(order[i] * piece, (order[i] + 1) * piece),
                  to.part(i * piece, (i + 1) * piece));
  }
  return partial;
}

void Hierarchical::all_reduce_by_parts(const at::Tensor& tensor, ReduceOp op) {
  const Elements values = elements_of(tensor);
  const at::ScalarType dtype = partial_dtype(values.dtype);
  const int64_t locals = map_.num_locals();
  const int64_t part = (values.numel + locals - 1) / locals;
  const bool fits = part * locals == values.numel;

  at::Tensor partial = tensor;
  if (!fits || dtype != values.dtype) {
    partial = at::zeros({part * locals}, at::TensorOptions(dtype));
    begin_partial(values, elements_of(partial).part(0, values.numel));
  }
  const ScratchTensor sums(empty_of(part, dtype));
  call_reduce_scatter(*inside_.backend, sums.tensor(), partial, sums_of(op));

  const ScratchTensor result(
      dtype == values.dtype ? sums.tensor() : empty_of(part, values.dtype));
  algorithms::all_reduce(*bridge_,
                         choose(Verb::kAllReduce, result.elements().nbytes()),
                         sums.elements(), result.elements(), reduction(op));

  const at::Tensor whole =
      fits ? tensor : empty_of(part * locals, values.dtype);
  call_all_gather(*inside_.backend, whole, result.tensor());
  copy(elements_of(whole).part(0, values.numel), values);
}

void Hierarchical::all_reduce_by_leaders(const at::Tensor& tensor,
                                         ReduceOp op) {
  const Elements values = elements_of(tensor);
  const at::ScalarType dtype = partial_dtype(values.dtype);
  const bool widens = dtype != values.dtype;
  const ScratchTensor partial(widens ? empty_of(values.numel, dtype) : tensor);
  if (widens) begin_partial(values, partial.elements());
  call_all_reduce(*inside_.backend, partial.tensor(), sums_of(op));
  if (bridge_) {
    algorithms::all_reduce(
        *bridge_,
        choose(Verb::kAllReduce, static_cast<int64_t>(tensor.nbytes())),
        partial.elements(), values, reduction(op));
  }
  call_broadcast(*inside_.backend, tensor, /*root=*/0);
}

void Hierarchical::reduce_scatter_by_parts(const at::Tensor& output,
                                           const at::Tensor& input,
                                           ReduceOp op) {
  const at::Tensor partial = ordered_partial(input, by_place());
  const ScratchTensor column(
      empty_of(map_.num_hosts() * output.numel(), partial.scalar_type()));
  call_reduce_scatter(*inside_.backend, column.tensor(), partial, sums_of(op));
  const Elements sums = column.elements();
  algorithms::reduce_scatter(*bridge_,
                             choose(Verb::kReduceScatter, sums.nbytes()), sums,
                             even_bounds(sums.numel, map_.num_hosts()),
                             elements_of(output), reduction(op));
}

void Hierarchical::reduce_scatter_by_leaders(const at::Tensor& output,
                                             const at::Tensor& input,
                                             ReduceOp op) {
  const int64_t piece = output.numel();
  const ScratchTensor scratch(ordered_partial(input, by_host()));
  call_all_reduce(*inside_.backend, scratch.tensor(), sums_of(op));
  const Elements partial = scratch.elements();
  const ScratchTensor own(
      empty_of(map_.num_locals() * piece, output.scalar_type()));
  if (bridge_) {
    algorithms::reduce_scatter(
        *bridge_, choose(Verb::kReduceScatter, partial.nbytes()), partial,
        host_bounds(piece), own.elements(), reduction(op));
  }
  call_broadcast(*inside_.backend, own.tensor(), /*root=*/0);
  copy(own.elements().part(map_.local * piece, (map_.local + 1) * piece),
       elements_of(output));
}

}  // namespace tessera::comm::algorithms
