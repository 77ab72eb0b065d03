// Reduces gradients in a thread of its own, in an order that ranks agree on.
//
// A cycle: an all_reduce(min) over what each rank has ready and what it lacks;
// what is ready on all of them is reduced, in the order of the parameters, in
// buffers of one dtype. A rank begins a cycle when more of its gradients became
// ready, or when all of them are; it waits there for the others to begin it.
// So cycles meet one to one, and every rank sees the same ones.
// End:     the destructor waits for no peer: what is under way is dropped.
// Threads: set_ready() and finish() from the one that runs backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/distributed_optimizer.h"

namespace tessera::wrappers {

class GradientCycle {
 public:
  GradientCycle(std::vector<at::Tensor> parameters, comm::Group& group,
                const DistributedOptimizerOptions& options);
  ~GradientCycle();
  GradientCycle(const GradientCycle&) = delete;
  GradientCycle& operator=(const GradientCycle&) = delete;

  // This parameter's gradient is complete on this rank.
  void set_ready(size_t parameter);
  // No more come: waits until all are reduced. Throws what the thread met.
  void finish();
  int64_t num_reductions() const { return num_reductions_; }

 private:
  enum class State : uint8_t { kAwaited, kReady, kLacking, kReduced };
  // Gradients that go through one all_reduce.
  struct Buffer {
    std::vector<size_t> parameters;
    at::Tensor data;  // a gradient itself where it is alone
    comm::Work work;
  };

  void run();
  void loop();
  bool may_begin() const;
  bool is_all_ready() const;
  std::vector<size_t> agree();
  std::vector<Buffer> buffers_of(std::vector<size_t> parameters) const;
  void reduce(const std::vector<size_t>& parameters);
  void fill(Buffer& buffer);
  void empty(const Buffer& buffer);
  at::Tensor gradient_of(size_t parameter);
  void await(comm::Work& work) const;

  const std::vector<at::Tensor> parameters_;
  comm::Group& group_;
  const DistributedOptimizerOptions options_;
  const RankContext context_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<State> states_;
  bool has_news_ = false;  // since the last cycle began
  size_t num_reduced_ = 0;
  std::exception_ptr failure_;
  std::atomic<bool> ends_ = false;
  std::atomic<int64_t> num_reductions_ = 0;
  std::thread thread_;
};

}  // namespace tessera::wrappers
