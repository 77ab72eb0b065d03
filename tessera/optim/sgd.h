// Stochastic gradient descent with momentum, as PyTorch computes it:
//
//   g <- g + weight_decay p                           where the segment decays
//   b <- momentum b + g (b starts at 0)         p <- p - lr b
//
// State:   "momentum.<parameter>" (b), where momentum is not 0; "step".
// Kernel:  ATen's fused one: one pass over memory.
#pragma once

#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct SgdOptions {
  double momentum = 0.0;
  double weight_decay = 0.0;
};

class Sgd final : public Optimizer {
 public:
  Sgd(std::vector<FlatSegment> segments, const SgdOptions& options);

 private:
  void update(const Group& group, double lr) override;

  SgdOptions options_;
  std::vector<at::Tensor> momentum_;  // empty without momentum
};

}  // namespace tessera::optim
