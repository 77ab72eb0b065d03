// Horovod's way: an optimizer of LibTorch that averages gradients by itself.
//
//   torch::optim::SGD sgd(model->parameters(), 0.1);
//   tessera::DistributedOptimizer optimizer(sgd, *communicator);
//   tessera::broadcast_parameters(*model, communicator->world());
//   ...  optimizer.zero_grad(); loss.backward(); optimizer.step();
//
// Fusion:  gradients are reduced in a thread while backward goes on: once a
//          cycle_time the ranks agree which are ready on all of them, whatever
//          the order in which each rank got them; these go, in the order of the
//          parameters, through buffers of up to fusion_threshold bytes.
// Comm:    on a group of its own. A cycle: an all_reduce(min) of two bytes a
//          parameter, and an all_reduce a buffer; none where nothing is ready.
// Missing: a gradient that some ranks lack counts as zero there; one that all
//          lack stays undefined, and the optimizer passes over it.
// Errors:  other parameters on another rank, or on a GPU; more backward passes
//          than were announced; in step() also what the group fails with, and
//          parameters that are trained only since. broadcast_parameters()
//          refuses a module of which ranks hold other parts.
// Threads: one calls it. Source: Sergeev and Del Balso 2018, arXiv 1802.05799.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

struct DistributedOptimizerOptions {
  // Bytes of one buffer; 0: each gradient by itself, where it lies.
  int64_t fusion_threshold = int64_t{64} << 20;
  // How long gradients are gathered before ranks agree; 0: not at all.
  std::chrono::milliseconds cycle_time{1};
  // Gradients are reduced with the last of so many; the loss is not divided.
  int64_t backward_passes_per_step = 1;
  bool mean = true;                 // false: the sum over ranks
  std::vector<int64_t> ranks = {};  // global, ascending; empty: all
};

class DistributedOptimizer {
 public:
  // Both live as long as this. What is to be trained is there, and requires a
  // gradient, by now: step() refuses more.
  // REQUIRES: every rank of the group makes it, and in the same order.
  DistributedOptimizer(torch::optim::Optimizer& optimizer,
                       comm::Communicator& communicator,
                       const DistributedOptimizerOptions& options = {});
  // Without waiting for peers: gradients that are under way are dropped.
  ~DistributedOptimizer();
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  void zero_grad() { optimizer_.zero_grad(); }
  // Waits until every gradient is reduced, and steps. Call order:
  // (zero_grad (backward)+ [synchronize] step)*
  void step();
  // The first half of step(): to clip gradients before the second.
  void synchronize();

  // All-reduces of gradients so far: how well they fuse.
  int64_t num_reductions() const;

 private:
  struct Impl;
  torch::optim::Optimizer& optimizer_;
  std::unique_ptr<Impl> impl_;
};

// The parameters and buffers of `root` (a rank of the group), on every rank.
void broadcast_parameters(torch::nn::Module& module, comm::Group& group,
                          int64_t root = 0);
// The state (moments, numbers of steps) and the options (learning rates, ...)
// of `root`, on every rank: also where root alone has any, having resumed.
// REQUIRES: the same kind of optimizer over the same parameters.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer,
                               comm::Group& group, int64_t root = 0);

}  // namespace tessera
