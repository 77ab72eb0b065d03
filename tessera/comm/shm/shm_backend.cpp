#include "tessera/comm/shm/shm_backend.h"

#include "tessera/comm/base/c10d_reduce_op.h"
#include "tessera/comm/base/split_bytes.h"
#include "tessera/comm/base/worker.h"
#include "tessera/comm/shm/collectives.h"
#include "tessera/comm/shm/messages.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {

ShmBackend::ShmBackend(Rendezvous rendezvous, Place place)
    : C10dForms(static_cast<int>(place.rank), static_cast<int>(place.size())),
      segment_(std::move(rendezvous), std::move(place)),
      collectives_(std::make_unique<Collectives>(segment_)),
      messages_(std::make_shared<Messages>(
          segment_, [this](const std::string& why) { fail(why); })),
      worker_(std::make_shared<Worker>(
          [this](const std::string& why) { fail(why); })) {}

ShmBackend::~ShmBackend() { close(); }

void ShmBackend::close() {
  worker_->close();
  messages_->close();
}

void ShmBackend::fail(const std::string& why) { segment_.fail(why); }

at::Tensor ShmBackend::allocateTensor(long numel, at::TensorOptions options) {
  return empty_registered({numel}, c10::typeMetaToScalarType(options.dtype()));
}

template <typename Body>
ShmBackend::Pending ShmBackend::run(c10d::OpType type, bool async,
                                    Tensors tensors, Body body) {
  auto work = c10::make_intrusive<PendingWork>(rank_, type, std::move(tensors),
                                               worker_);
  auto bound = [this, body = std::move(body)] { body(*collectives_); };
  if (async) {
    worker_->submit(work, std::move(bound));
  } else {
    worker_->run(work, bound);
  }
  return work;
}

ShmBackend::Pending ShmBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor tensor = tensors.at(0);
  const ReduceOp op =
      reduce_op_of(options.reduceOp, tensor.scalar_type(), "shm");
  return run(c10d::OpType::ALLREDUCE, options.asyncOp, tensors,
             [tensor, op](Collectives& collectives) {
               collectives.all_reduce(tensor.data_ptr(), tensor.numel(),
                                      tensor.scalar_type(), op);
             });
}

ShmBackend::Pending ShmBackend::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = tensors.at(0);
  return run(c10d::OpType::BROADCAST, options.asyncOp, tensors,
             [tensor, root = options.rootRank](Collectives& collectives) {
               collectives.broadcast(tensor.data_ptr(), tensor.numel(),
                                     tensor.scalar_type(), root);
             });
}

ShmBackend::Pending ShmBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  return run(c10d::OpType::_ALLGATHER_BASE, options.asyncOp, {output},
             [output, input](Collectives& collectives) {
               collectives.all_gather(output.data_ptr(), input.data_ptr(),
                                      input.numel(), input.scalar_type());
             });
}

ShmBackend::Pending ShmBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  const ReduceOp op =
      reduce_op_of(options.reduceOp, input.scalar_type(), "shm");
  return run(c10d::OpType::_REDUCE_SCATTER_BASE, options.asyncOp, {output},
             [output, input, op](Collectives& collectives) {
               collectives.reduce_scatter(output.data_ptr(), input.data_ptr(),
                                          output.numel(), output.scalar_type(),
                                          op);
             });
}

ShmBackend::Pending ShmBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return run(c10d::OpType::ALLTOALL_BASE, options.asyncOp, {output},
             [output, input, out = split_bytes(output, output_splits),
              in = split_bytes(input, input_splits)](Collectives& collectives) {
               collectives.all_to_all(out, output.data_ptr(), in,
                                      input.data_ptr(), input.scalar_type());
             });
}

ShmBackend::Pending ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return run(c10d::OpType::BARRIER, options.asyncOp, {},
             [](Collectives& collectives) { collectives.barrier(); });
}

ShmBackend::Pending ShmBackend::send(Tensors& tensors, int peer, int tag) {
  return transfer(c10d::OpType::SEND, tensors, peer, tag);
}

ShmBackend::Pending ShmBackend::recv(Tensors& tensors, int peer, int tag) {
  return transfer(c10d::OpType::RECV, tensors, peer, tag);
}

ShmBackend::Pending ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return transfer(c10d::OpType::RECVANYSOURCE, tensors, kAnyPeer, tag);
}

ShmBackend::Pending ShmBackend::transfer(c10d::OpType type,
                                         const Tensors& tensors, int64_t peer,
                                         int tag) {
  auto work = c10::make_intrusive<PendingWork>(rank_, type, tensors, messages_);
  messages_->submit({.work = work,
                     .tensor = tensors.at(0),
                     .sends = type == c10d::OpType::SEND,
                     .peer = peer,
                     .tag = tag});
  return work;
}

}  // namespace tessera::comm::shm
