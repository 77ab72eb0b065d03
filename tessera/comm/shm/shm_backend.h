// c10d::Backend over shared memory, for ranks of one host: processes, threads.
//
// Collectives run in the order of the calls, on the caller's thread where it
// waits and on one of the group where it does not; messages (send, recv) make
// progress likewise, with a thread of their own, so that they never wait for a
// collective. Both threads start with the first call that needs them.
// Order:  sums are taken in rank order: the same bits on every rank.
// Errors: a dead or absent peer and time-outs (c10::DistBackendError), ranks
//         that disagree about what they do (TS_CHECK) fail the Work, and with
//         it all later calls, here and on every peer. Ranks that are threads
//         may still write to the tensors of a call that failed: they stay.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/base/c10d_forms.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm {
class Worker;
}

namespace tessera::comm::shm {

class Collectives;
class Messages;

class ShmBackend : public C10dForms {
 public:
  // Blocks until every rank of the group is here.
  ShmBackend(Rendezvous rendezvous, Place place);
  // Waits for what is pending.
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  // Registered memory: FSDP2 asks for it by itself.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long numel, at::TensorOptions options) override;
  // Fails what is pending here and on the peers, for this reason.
  void fail(const std::string& why);
  // Waits for what is pending; nothing is called behind it.
  void close();

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
  Pending recvAnysource(Tensors& tensors, int tag) override;

 private:
  // Runs `body(Collectives&)`: if not async on this thread, done on return.
  template <typename Body>
  Pending run(c10d::OpType type, bool async, Tensors tensors, Body body);
  Pending transfer(c10d::OpType type, const Tensors& tensors, int64_t peer,
                   int tag);

  Segment segment_;
  std::unique_ptr<Collectives> collectives_;
  std::shared_ptr<Messages> messages_;
  std::shared_ptr<Worker> worker_;
};

}  // namespace tessera::comm::shm
