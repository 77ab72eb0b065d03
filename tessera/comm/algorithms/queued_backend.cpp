#include "tessera/comm/algorithms/queued_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <cstdint>

#include "tessera/comm/algorithms/backend_transport.h"
#include "tessera/comm/base/c10d_reduce_op.h"
#include "tessera/comm/base/reduce.h"
#include "tessera/comm/base/split_bytes.h"
#include "tessera/comm/base/worker.h"
#include "tessera/core/error.h"

namespace tessera::comm::algorithms {
namespace {

using Tensors = std::vector<at::Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;

// One tag is the algorithms' own: those of messages go around it.
int tag_below(int tag) {
  if (tag < BackendTransport::kTag) return tag;
  TS_CHECK(tag < INT32_MAX, "tag ", tag, " is not below ", INT32_MAX,
           ", the largest that comm.algorithm leaves. Use a smaller one.");
  return tag + 1;
}

class QueuedBackend : public c10d::Backend {
 public:
  QueuedBackend(int rank, int size,
                std::unique_ptr<BlockingCollectives> collectives)
      : Backend(rank, size),
        collectives_(std::move(collectives)),
        worker_(std::make_unique<Worker>(
            [this](const std::string& why) { collectives_->fail(why); })) {}
  ~QueuedBackend() override { worker_->close(); }

  const std::string getBackendName() const override {
    return collectives_->name();
  }
  void fail(const std::string& why) { collectives_->fail(why); }
  void close() {
    worker_->close();
    collectives_->close();
  }

  Pending allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override {
    const ReduceOp op = reduce_op_of(
        options.reduceOp, tensors.at(0).scalar_type(), getBackendName());
    return run(c10d::OpType::ALLREDUCE, tensors,
               [this, op, t = tensors[0]] { collectives_->all_reduce(t, op); });
  }

  Pending broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override {
    return run(c10d::OpType::BROADCAST, tensors,
               [this, root = options.rootRank, t = tensors.at(0)] {
                 collectives_->broadcast(t, root);
               });
  }

  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    return run(c10d::OpType::_ALLGATHER_BASE, {output}, [this, output, input] {
      collectives_->all_gather(output, input);
    });
  }

  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    const ReduceOp op =
        reduce_op_of(options.reduceOp, input.scalar_type(), getBackendName());
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, {output},
               [this, output, input, op] {
                 collectives_->reduce_scatter(output, input, op);
               });
  }

  Pending alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions&) override {
    return run(c10d::OpType::ALLTOALL_BASE, {output},
               [this, output, input, out = split_bytes(output, output_splits),
                in = split_bytes(input, input_splits)] {
                 collectives_->all_to_all(output, input, out, in);
               });
  }

  Pending barrier(const c10d::BarrierOptions&) override {
    return run(c10d::OpType::BARRIER, {}, [this] { collectives_->barrier(); });
  }

  Pending send(Tensors& tensors, int peer, int tag) override {
    return collectives_->send(tensors, peer, tag_below(tag));
  }

  Pending recv(Tensors& tensors, int peer, int tag) override {
    return collectives_->recv(tensors, peer, tag_below(tag));
  }

 private:
  Pending run(c10d::OpType type, Tensors tensors, std::function<void()> body) {
    auto work =
        c10::make_intrusive<PendingWork>(rank_, type, std::move(tensors));
    worker_->submit(work, [body = std::move(body)] {
      at::AutoDispatchBelowAutograd guard;
      body();
    });
    return work;
  }

  std::unique_ptr<BlockingCollectives> collectives_;
  std::unique_ptr<Worker> worker_;
};

}  // namespace

Connection make_queued(int rank, int size,
                       std::unique_ptr<BlockingCollectives> collectives) {
  auto backend =
      c10::make_intrusive<QueuedBackend>(rank, size, std::move(collectives));
  return {.backend = backend,
          .fail = [backend](const std::string& why) { backend->fail(why); },
          .close = [backend] { backend->close(); }};
}

}  // namespace tessera::comm::algorithms
