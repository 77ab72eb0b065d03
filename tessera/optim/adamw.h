// Adam with decoupled weight decay, as PyTorch computes it:
//
//   p <- p (1 - lr weight_decay)                      where the segment decays
//   m <- m + (1 - beta1)(g - m)          v <- beta2 v + (1 - beta2) g^2
//   p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// State:   "exp_avg.<parameter>" (m), "exp_avg_sq.<parameter>" (v), "step" (t).
// Kernel:  ATen's fused one: one pass over memory.
// Source:  Loshchilov and Hutter 2019, arXiv 1711.05101.
#pragma once

#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

class AdamW final : public Optimizer {
 public:
  AdamW(std::vector<FlatSegment> segments, const AdamWOptions& options);

 private:
  void update(const Group& group, double lr) override;

  AdamWOptions options_;
  std::vector<at::Tensor> exp_avg_;
  std::vector<at::Tensor> exp_avg_sq_;
};

}  // namespace tessera::optim
