// BatchNorm whose statistics are those of all ranks' batches together.
//
//   namespace nn = torch::nn;
//   tessera::SyncBatchNorm norm(nn::BatchNormOptions(64), ranks.world());
//
// Shapes:  x (N, C, ...) of two dims or more; ranks may have other N, and other
//          sizes behind C. Parameters and buffers are BatchNorm's, by name, so
//          that files of the one are read by the other.
// Statistics: of n_r numbers a channel with mean m_r and variance v_r on rank
//          r, mean = sum n_r m_r / n, variance = sum n_r (v_r + (m_r - mean)^2)
//          / n, in fp32 where x is narrower. Running ones take the unbiased
//          variance. With running ones eval() uses these alone.
// Comm:    training: an all_gather of 2 C + 1 numbers, and a reduce_scatter of
//          their gradients. Every rank calls it, in the same order.
// Gradients: of the sum of all ranks' losses, whose mean over ranks is what
//          DistributedDataParallel and Schedule's replicas make of them.
// Errors:  TS_CHECK for an x that has no numbers, of too few dims, or of other
//          channels.
// Threads: the group outlives the graph.
// Source:  torch.nn.SyncBatchNorm; the sums: Chan et al. 1983.
#pragma once

#include <torch/nn/modules/batchnorm.h>

#include "tessera/comm/group.h"

namespace tessera {

class SyncBatchNormImpl
    : public torch::nn::NormImplBase<2, SyncBatchNormImpl,
                                     torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                    comm::Group& ranks)
      : NormImplBase(options), ranks_(&ranks) {}

  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& x) override;

 private:
  double count_batch();

  comm::Group* ranks_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace tessera
