#include "tessera/comm/fake/fake_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "tessera/core/error.h"

namespace tessera::comm::fake {
namespace {

class DoneWork : public c10d::Work {
 public:
  DoneWork(int rank, c10d::OpType type, std::vector<at::Tensor> tensors)
      : Work(rank, type),
        tensors_(std::move(tensors)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(tensors_));
    finish();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The reduction of `size` equal values; min, max and mean leave them.
void reduce_equal(at::Tensor& tensor, const c10d::ReduceOp& op, int size) {
  if (op.op_ == c10d::ReduceOp::SUM) tensor.mul_(size);
  if (op.op_ == c10d::ReduceOp::PRODUCT) tensor.pow_(size);
}

}  // namespace

FakeBackend::Pending FakeBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  at::AutoDispatchBelowAutograd guard;
  if (size_ > 1) reduce_equal(tensors.at(0), options.reduceOp, size_);
  return c10::make_intrusive<DoneWork>(rank_, c10d::OpType::ALLREDUCE, tensors);
}

FakeBackend::Pending FakeBackend::broadcast(Tensors& tensors,
                                            const c10d::BroadcastOptions&) {
  return c10::make_intrusive<DoneWork>(rank_, c10d::OpType::BROADCAST, tensors);
}

FakeBackend::Pending FakeBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  at::AutoDispatchBelowAutograd guard;
  // `output` may hold `input` at this rank's place.
  const at::Tensor pieces = output.view({size_, input.numel()});
  for (int rank = 0; rank < size_; ++rank) {
    const at::Tensor piece = pieces.select(0, rank);
    if (piece.data_ptr() != input.data_ptr()) piece.copy_(input.view(-1));
  }
  return c10::make_intrusive<DoneWork>(rank_, c10d::OpType::_ALLGATHER_BASE,
                                       Tensors{output});
}

FakeBackend::Pending FakeBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  at::AutoDispatchBelowAutograd guard;
  output.view(-1).copy_(input.view({size_, output.numel()}).select(0, rank_));
  if (size_ > 1) reduce_equal(output, options.reduceOp, size_);
  return c10::make_intrusive<DoneWork>(
      rank_, c10d::OpType::_REDUCE_SCATTER_BASE, Tensors{output});
}

FakeBackend::Pending FakeBackend::alltoall_base(at::Tensor& output,
                                                at::Tensor& input,
                                                std::vector<int64_t>&,
                                                std::vector<int64_t>&,
                                                const c10d::AllToAllOptions&) {
  TS_CHECK(size_ > 1 || output.numel() == input.numel(),
           "this rank sends itself ", input.numel(), " elements and expects ",
           output.numel(), ".");
  at::AutoDispatchBelowAutograd guard;
  // What the peers would send is not known: as much of this rank's as fits.
  output.zero_();
  const int64_t count = std::min(output.numel(), input.numel());
  output.view(-1).narrow(0, 0, count).copy_(input.view(-1).narrow(0, 0, count));
  return c10::make_intrusive<DoneWork>(rank_, c10d::OpType::ALLTOALL_BASE,
                                       Tensors{output});
}

FakeBackend::Pending FakeBackend::barrier(const c10d::BarrierOptions&) {
  return c10::make_intrusive<DoneWork>(rank_, c10d::OpType::BARRIER, Tensors{});
}

FakeBackend::Pending FakeBackend::send(Tensors& tensors, int, int) {
  return c10::make_intrusive<DoneWork>(rank_, c10d::OpType::SEND, tensors);
}

FakeBackend::Pending FakeBackend::recv(Tensors& tensors, int, int) {
  at::AutoDispatchBelowAutograd guard;
  tensors.at(0).zero_();
  return c10::make_intrusive<DoneWork>(rank_, c10d::OpType::RECV, tensors);
}

}  // namespace tessera::comm::fake
