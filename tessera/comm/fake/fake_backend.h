// c10d::Backend of one process that acts as one rank of a world of any size.
//
// There are no peers and every operation is done at once, with the result that
// it would have if every rank held the values of this one: a sum is the tensor
// times the ranks, a gather repeats it; a received message is zeros. Of a group
// of one rank these are the exact results. Works on meta tensors too.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

namespace tessera::comm::fake {

class FakeBackend : public c10d::Backend {
 public:
  FakeBackend(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "fake"; }

  using Tensors = std::vector<at::Tensor>;
  using Pending = c10::intrusive_ptr<c10d::Work>;
  Pending allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override;
  Pending broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override;
  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  Pending alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  Pending barrier(const c10d::BarrierOptions& options) override;
  Pending send(Tensors& tensors, int peer, int tag) override;
  Pending recv(Tensors& tensors, int peer, int tag) override;
};

}  // namespace tessera::comm::fake
