// The optimizers that there are: one list, in registry.cpp, from which follow
// the choices of optimizer.type, the tensors that are kept and their names in
// checkpoints, the memory that is reckoned with, and which keys have no effect.
//
// A rule is what tells one optimizer from another: a function that updates some
// tensors. What is common to all (masters of low precision, state, steps, parts
// of a step) is optimizer.h's.
// To add one: its header, its source, and an entry in the list.
#pragma once

#include <string>
#include <vector>

#include "tessera/optim/optim_config.h"
#include "tessera/optim/update_group.h"

namespace tessera::optim {

// A tensor that is kept for each parameter, zero at first.
struct Moment {
  std::string name;        // in checkpoints: "exp_avg" of "exp_avg.<parameter>"
  int gradient_power = 1;  // it grows with that power of the gradient
  // Kept only where this key is not 0; nullptr: always.
  double OptimizerConfig::* only_with = nullptr;
};

struct UpdateRule {
  std::string name;  // in optimizer.type
  // In place, and the copies; each element by itself: a tensor may be part of a
  // parameter. The gradients may be scaled where they lie.
  void (*update)(const OptimizerConfig& config, const UpdateGroup& group);
  std::vector<Moment> moments;
  // Of optimizer.*, beside type, lr, weight_decay and what scales gradients.
  std::vector<std::string> keys;
  std::vector<double> betas;  // where optimizer.betas is empty
  std::string source;
  // Its steps do not shrink with the gradient: where that is zero but for
  // rounding, they are whole, and their direction is chance.
  bool by_sign = false;
  // Of one that heeds UpdateGroup::scale_there and pace_there, where
  // detail::reads_there(): the latter's numbers, of a group's step, lr and
  // weight decay.
  Pace (*pace)(const OptimizerConfig& config,
               const UpdateGroup& group) = nullptr;
  // Of a rule for whole matrices, which the pieces of a step's `piece` are put
  // together to; and by whom all other parameters are updated.
  at::Tensor (*piece)(const OptimizerConfig& config,
                      const UpdateGroup& group) = nullptr;
  Direction (*of_whole)(const OptimizerConfig& config,
                        at::Tensor whole) = nullptr;
  std::string others = {};

  bool uses(const std::string& key) const;
  std::vector<Moment> moments_with(const OptimizerConfig& config) const;
};

const std::vector<UpdateRule>& update_rules();
// Refuses an unknown name with the known ones.
const UpdateRule& update_rule(const std::string& name);

std::vector<std::string> optimizer_names();

}  // namespace tessera::optim
