// Data parallelism, one process (or thread) a device, for any module.
//
//   tessera::DistributedDataParallel model(ResNet(), communicator->world());
//   auto output = model.forward(input);
//   model.backward(loss_of(output, target));  // reduces while it runs
//   optimizer.step();
//
// Or as with PyTorch's, which adds to what .grad holds:
//
//   optimizer.zero_grad();
//   loss_of(model.forward(input), target).backward();  // reduces too
//   optimizer.step();
//
// Comm:    at construction: a comparison of the parameters' names and shapes,
//          and a broadcast of rank 0's parameters and buffers. forward():
//          once a step, a broadcast of rank 0's buffers (BatchNorm's
//          statistics), where there are any; while some rank has joined, of
//          the first that has not, which an all_reduce of a number finds.
//          backward(): one all_reduce a
//          bucket; the gradient is the mean over the ranks that had data.
//          Behind the first step the buckets' order is broadcast, at the end
//          of a join() parameters and buffers.
// Accumulate: accumulate(loss) adds gradients without any communication;
//          backward(loss) ends the step. The first of either in a step begins
//          with zeros.
// Uneven data: a rank whose data has ended calls join(), which takes part with
//          zero weight until every rank has ended: not with SyncBatchNorm,
//          whose statistics want every rank's forward. Then all have the
//          parameters and buffers of one that had the most; an optimizer's
//          states stay each rank's own.
// Errors:  a parameter without gradient is named on every rank, and nobody
//          hangs; allow_unused makes its gradient zero instead. forward()
//          refuses a model whose last backward did not end, whose parameters
//          got other memory, dtype or device (load by wrappers/load.h), or that
//          has others to train than when it was wrapped, which were not
//          reduced; join() one with SyncBatchNorm. A module of which ranks of
//          the group hold other parts: experts, shares of parallelize(), or
//          shards of fully_shard(). A parameter that gets one more gradient in
//          a backward, behind the sum of its bucket (recompute() of one part
//          several times): set overlap to false.
// Limits:  loss.backward() must reach a parameter, and run no other backward
//          inside (reentrant checkpoints): model.backward(loss) need not, whose
//          loss need not even require a gradient.
// Threads: as comm::Group: one thread a rank.
// Source:  Li et al. 2020, arXiv 2006.15704.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera {

struct DistributedDataParallelOptions {
  int64_t bucket_bytes = int64_t{25} << 20;
  bool overlap = true;
  bool broadcast_buffers = true;
  bool allow_unused = false;
};

namespace wrappers {

class GradientReducer;

// What does not depend on the module's type.
class DistributedDataParallelCore {
 public:
  DistributedDataParallelCore(torch::nn::Module& module, comm::Group& group,
                              const DistributedDataParallelOptions& options);
  ~DistributedDataParallelCore();
  DistributedDataParallelCore(DistributedDataParallelCore&& other) noexcept;
  DistributedDataParallelCore& operator=(DistributedDataParallelCore&& other) =
      delete;

  void before_forward();
  void accumulate(const at::Tensor& loss);
  void backward(const at::Tensor& loss);
  void join();

 private:
  void require_same_to_train() const;
  int64_t root_of_buffers();
  void take_newest(int64_t reductions);

  torch::nn::Module& module_;
  comm::Group& group_;
  DistributedDataParallelOptions options_;
  std::unique_ptr<GradientReducer> reducer_;
  std::vector<bool> trains_;   // by parameter
  int64_t buffers_step_ = -1;  // reductions when buffers were broadcast
  bool has_joined_ = false;
};

}  // namespace wrappers

// Holder: a module holder (ResNet) or a std::shared_ptr to a module.
template <typename Holder>
class DistributedDataParallel {
 public:
  DistributedDataParallel(Holder module, comm::Group& group,
                          const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)), core_(*module_, group, options) {}

  template <typename... Args>
  auto forward(Args&&... args) {
    core_.before_forward();
    return module_->forward(std::forward<Args>(args)...);
  }
  // A micro-batch whose gradients stay on this rank for now.
  void accumulate(const at::Tensor& loss) { core_.accumulate(loss); }
  // The step's last micro-batch: gradients are averaged when this returns.
  void backward(const at::Tensor& loss) { core_.backward(loss); }
  // This rank has no more data; returns when no rank has.
  void join() { core_.join(); }

  Holder& module() { return module_; }

 private:
  Holder module_;
  wrappers::DistributedDataParallelCore core_;
};

}  // namespace tessera
