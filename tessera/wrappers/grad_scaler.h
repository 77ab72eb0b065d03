// torch.amp.GradScaler for a loop of one's own on several ranks: all of them
// skip the same steps, and have the same scale.
//
//   tessera::GradScaler scaler(communicator->world());
//   for (...) {
//     optimizer.zero_grad();
//     scaler.scale(loss_of(model.forward(input), target)).backward();
//     scaler.unscale(optimizer);    // only to see gradients, as clipping does
//     model.clip_grad_norm(1.0);
//     scaler.step(optimizer);       // not where some rank's are not finite
//     scaler.update();
//   }
//
// Rule:    optim/loss_scale.h's. A clip_grad_norm() between two may see
//          gradients that are not finite: what it makes of them is not used.
// Order:   (scale+ [unscale] step update)*, of one optimizer.
// Comm:    one all_reduce(max) of a double over `ranks` in unscale(), or else
//          in step(): every rank that updates, of all axes.
// Errors:  TS_CHECK on another order, and at the floor of the scale.
// Threads: as comm::Group: one thread a rank.
#pragma once

#include <torch/optim/optimizer.h>

#include "tessera/comm/communicator.h"
#include "tessera/optim/loss_scale.h"

namespace tessera {

class GradScaler {
 public:
  // The group lives as long as this. `rule.fixed` 0: the scale is found;
  // `rule.words` are said at its floor.
  explicit GradScaler(comm::Group& ranks,
                      const optim::LossScaleRule& rule = {.fixed = 0});

  at::Tensor scale(const at::Tensor& loss) const;
  // Divides gradients by the scale where they lie.
  void unscale(torch::optim::Optimizer& optimizer);
  // Whether the optimizer's step was taken: alike on all ranks.
  bool step(torch::optim::Optimizer& optimizer);
  void update();

  double value() const { return loss_scale_.value(); }
  // To go on from: alike on all ranks, whatever their number.
  const optim::LossScaleState& state() const { return loss_scale_.state(); }
  void load(const optim::LossScaleState& state) { loss_scale_.go_on(state); }

 private:
  enum class At { kBackward, kUnscaled, kStepped };
  comm::Group& ranks_;
  optim::LossScale loss_scale_;
  At at_ = At::kBackward;
  bool is_finite_ = true;
};

}  // namespace tessera
