// The backend that torch.distributed holds: a backend of tessera/comm/ under
// the name "tessera", with what front ends expect around its operations.
//
// Checks:   dense CPU tensors, one after the other in memory where a form is
//           not a list; sizes that fit. The backends below trust their callers.
// Profiler: while one is active, every operation records an event, such as
//           "tessera:all_reduce".
// Errors:   of a peer or of time get the names of the operation and the group.
// Futures:  complete outside the group's own threads, so that what Python hangs
//           on them (DDP's communication hooks) may wait for other operations.
// GIL:      never held while threads are joined.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bindings/python/callback_threads.h"

namespace tessera::python {

class PythonBackend : public c10d::Backend {
 public:
  // `where` goes into errors ("on rank 0 of 2"); `fail` makes what is pending
  // fail, here and on the peers.
  PythonBackend(c10::intrusive_ptr<c10d::Backend> backend, std::string where,
                std::function<void(const std::string& why)> fail);
  // Waits for what is pending.
  ~PythonBackend() override;

  const std::string getBackendName() const override { return "tessera"; }
  void abort() override { fail_("it was aborted"); }
  // The same on all ranks that did the same: TORCH_DISTRIBUTED_DEBUG=DETAIL.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using Pending = c10::intrusive_ptr<c10d::Work>;
  Pending allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override;
  Pending allreduce_sparse(Tensors& tensors,
                           const c10d::AllreduceOptions& options) override;
  Pending allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Pending broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override;
  Pending allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  Pending allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  Pending allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  Pending gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  Pending scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  Pending reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  Pending reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override;
  Pending alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  Pending alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  Pending barrier(const c10d::BarrierOptions& options) override;
  Pending send(Tensors& tensors, int peer, int tag) override;
  Pending recv(Tensors& tensors, int peer, int tag) override;
  Pending recvAnysource(Tensors& tensors, int tag) override;

 private:
  using Start = std::function<Pending()>;
  // Counts a collective and starts it as `message` does.
  Pending collective(const char* title, const Tensors& inputs,
                     const Start& start);
  // Starts an operation; `title` and `inputs` are for a profiler.
  Pending message(const char* title, const Tensors& inputs, const Start& start);

  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<CallbackThreads> threads_;
  std::string where_;
  std::function<void(const std::string&)> fail_;
  std::atomic<uint64_t> sequence_ = 0;
};

}  // namespace tessera::python
