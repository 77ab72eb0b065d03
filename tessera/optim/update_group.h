// What an optimizer's rule updates together.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::optim {

// Where a parameter goes, and by how much of the learning rate.
struct Direction {
  at::Tensor tensor;
  double scale = 1;
};

// Numbers of a rule that change from step to step.
inline constexpr size_t kPaceNumbers = 3;
using Pace = std::array<double, kPaceNumbers>;

// No gradient is missing; all tensors of a parameter have its shape, and all of
// them are contiguous.
struct UpdateGroup {
  int64_t step = 1;  // the one that is being taken, over all runs, from 1
  double lr = 0;
  double weight_decay = 0;    // 0 for those that do not decay
  double gradient_scale = 1;  // gradients count times it
  // And times this number of their device, (1) of fp64; is it none, nothing is
  // updated. Of rules that read it there; undefined: no other factor.
  at::Tensor scale_there = {};
  // What of a rule's numbers changes from step to step (UpdateRule::pace),
  // (kPaceNumbers) of fp64 on their device, in place of step and lr; undefined:
  // these.
  at::Tensor pace_there = {};
  std::vector<at::Tensor> parameters;  // or their masters: all fp32 or all fp64
  std::vector<at::Tensor> gradients;   // as they were reduced: of any type
  std::vector<std::vector<at::Tensor>> moments;  // as the rule lists them
  // Of each master, the parameter in low precision; undefined where the
  // parameter is its own master.
  std::vector<at::Tensor> copies;
  // Of rules that make them of whole matrices: of each parameter's part.
  std::vector<Direction> directions = {};
};

// By operators of LibTorch: `update` gets gradients of the masters' type, which
// are scaled, and need not heed the copies. One pass over memory for each.
void update_in_passes(const UpdateGroup& group,
                      const std::function<void(const UpdateGroup&)>& update);

}  // namespace tessera::optim
