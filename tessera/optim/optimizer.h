// Optimizers over named segments: whole parameters, or a rank's flat shards of
// them. An optimizer does not know which.
//
//   auto optimizer = optim::make_optimizer(config, std::move(segments));
//   optimizer->step(optim::lr_at(step, steps, config.lr, schedule));
//
// Precision: parameters in fp32 or fp64 are updated as they are. One in bf16 or
//          fp16 gets an fp32 master here, which is updated and copied back:
//          make the optimizer when the parameters hold their values.
// Comm:    none: gradients arrive reduced and clipped.
// Errors:  a gradient that is missing or of another shape is refused by name,
//          before anything is changed. Parameters (or masters) of two types or
//          on two devices are refused.
// Threads: an optimizer belongs to one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/optim/optim_config.h"

namespace tessera::optim {

struct FlatSegment {
  std::string name;      // the parameter's
  at::Tensor parameter;  // contiguous; may be empty
  // Where the gradient lies. Undefined: in parameter.grad() at each step.
  at::Tensor gradient;
  bool decay = false;  // weight decay: for parameters of two or more dims
};

struct NamedTensor {
  std::string name;       // "exp_avg.blocks.0.attention.q.weight"
  std::string parameter;  // whose layout it has; "": one number for all
  at::Tensor tensor;      // live: copying into it loads the state
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // One update of every segment.
  void step(double lr);
  // Steps taken, over all runs: part of the state.
  int64_t steps() const;
  // Everything that a resumed run needs beside the parameters.
  const std::vector<NamedTensor>& state() const { return state_; }
  const std::vector<FlatSegment>& segments() const { return segments_; }

 protected:
  // Segments that are updated together, all fp32 or all fp64.
  struct Group {
    std::vector<size_t> segments;
    bool decay = false;
    std::vector<at::Tensor> parameters;  // or their masters
    std::vector<at::Tensor> gradients;   // of this step

    // The group's part of a tensor for each segment.
    std::vector<at::Tensor> part_of(const std::vector<at::Tensor>& all) const;
  };

  explicit Optimizer(std::vector<FlatSegment> segments);
  // REQUIRES: steps() counts the step that is being taken, from 1.
  virtual void update(const Group& group, double lr) = 0;

  // A further state tensor for each segment, zero at first.
  std::vector<at::Tensor> add_state(const std::string& prefix);

 private:
  void add_masters();
  at::Tensor gradient_of(size_t segment) const;

  std::vector<FlatSegment> segments_;
  std::vector<at::Tensor> masters_;  // or the parameter itself
  std::array<Group, 2> groups_;      // without decay, with decay
  std::vector<NamedTensor> state_;
  at::Tensor steps_;  // int64, on the CPU
};

// REQUIRES: a configuration that was checked.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          std::vector<FlatSegment> segments);

}  // namespace tessera::optim
