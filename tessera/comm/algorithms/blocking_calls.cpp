#include "tessera/comm/algorithms/blocking_calls.h"

#include "tessera/comm/base/c10d_reduce_op.h"
#include "tessera/comm/base/split_bytes.h"

namespace tessera::comm::algorithms {

void call_all_reduce(c10d::Backend& backend, const at::Tensor& tensor,
                     ReduceOp op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d_op_of(op);
  backend.allreduce(tensors, options)->wait();
}

void call_all_gather(c10d::Backend& backend, const at::Tensor& output,
                     const at::Tensor& input) {
  at::Tensor out = output, in = input;
  backend._allgather_base(out, in, {})->wait();
}

void call_reduce_scatter(c10d::Backend& backend, const at::Tensor& output,
                         const at::Tensor& input, ReduceOp op) {
  at::Tensor out = output, in = input;
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d_op_of(op);
  backend._reduce_scatter_base(out, in, options)->wait();
}

void call_all_to_all(c10d::Backend& backend, const at::Tensor& output,
                     const at::Tensor& input,
                     std::vector<int64_t> output_splits,
                     std::vector<int64_t> input_splits) {
  at::Tensor out = bytes_of(output), in = bytes_of(input);
  backend.alltoall_base(out, in, output_splits, input_splits, {})->wait();
}

void call_broadcast(c10d::Backend& backend, const at::Tensor& tensor,
                    int64_t root) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  backend.broadcast(tensors, options)->wait();
}

void call_barrier(c10d::Backend& backend) { backend.barrier({})->wait(); }

Elements elements_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.numel(),
          tensor.scalar_type()};
}

}  // namespace tessera::comm::algorithms
