// A Sequential over the ranks of a pipeline, in one line: cut by itself, each
// rank with its part.
//
//   tessera::Pipe pipe(net, ranks.world(), {.num_microbatches = 4,
//                                           .loss = loss_of});
//   torch::optim::SGD optimizer(pipe.parameters(), 0.1);
//   const auto step = pipe.step(inputs, targets);   // pipeline.h
//
// Parts: runs of children, in order, that keep their names: a parameter is
//        called as in the whole on every rank ("3.weight" is "3.weight").
//        split() shares out so that the largest part is as small as it can be.
// Values: each rank's own net's: draw the same on all ranks, or load them. What
//        a rank does not run lives as long as the caller's `whole`.
// Errors: TS_CHECK_CONFIG for more parts than children, for lengths that do not
//        add up, and for a parameter that two parts have (tied weights).
// Source: Huang et al. 2019, arXiv 1811.06965 (GPipe).
#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <vector>

#include "tessera/wrappers/pipeline.h"

namespace tessera {

enum class CutBy { kParameters, kChildren };

// The parts of `whole`, which share its children.
std::vector<torch::nn::Sequential> split(const torch::nn::Sequential& whole,
                                         int64_t parts,
                                         CutBy by = CutBy::kParameters);
// By the numbers of children of each part.
std::vector<torch::nn::Sequential> split(const torch::nn::Sequential& whole,
                                         const std::vector<int64_t>& lengths);

class Pipe {
 public:
  // Cut into as many parts as the ranks have stages, `chunks` a rank.
  Pipe(const torch::nn::Sequential& whole, comm::Group& ranks,
       const ScheduleOptions& options, int64_t chunks = 1,
       CutBy by = CutBy::kParameters);

  Schedule::Result step(const at::Tensor& inputs = {},
                        const at::Tensor& targets = {}) {
    return schedule_.step(inputs, targets);
  }
  Schedule::Result eval(const at::Tensor& inputs = {},
                        const at::Tensor& targets = {}) {
    return schedule_.eval(inputs, targets);
  }
  double clip_grad_norm(double most) { return schedule_.clip_grad_norm(most); }
  // This rank's, in the order of its chunks.
  const std::vector<torch::nn::Sequential>& parts() const { return parts_; }
  std::vector<at::Tensor> parameters() const;
  const std::vector<PipelineStage>& stages() const {
    return schedule_.stages();
  }
  const Schedule& schedule() const { return schedule_; }

 private:
  std::vector<torch::nn::Sequential> parts_;
  Schedule schedule_;
};

}  // namespace tessera
