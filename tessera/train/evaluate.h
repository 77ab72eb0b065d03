// The mean loss of a model over a fixed set of samples.
//
// Shapes: samples as the data set has them: inputs and targets (B, T).
// Comm:   samples are shared out in runs of `micro` over the ranks of `data`;
//         one all_gather of two doubles a rank over `world` at the end. Every
//         rank evaluates as many batches as the others, since that may be
//         collective too.
#pragma once

#include <cstdint>
#include <functional>

#include "tessera/comm/group.h"
#include "tessera/data/dataset.h"
#include "tessera/nn/loss.h"

namespace tessera::train {

// At most this many samples, the first ones, so that validation stays short
// beside training.
inline constexpr int64_t kMaxValidationSamples = 512;

struct MeanLoss {
  double loss = 0;  // nats a token
  int64_t tokens = 0;
};

// What a rank counts of the loss of one batch.
using Evaluate = std::function<nn::LossSum(const data::Batch&)>;

MeanLoss mean_loss(const Evaluate& evaluate, const data::Dataset& samples,
                   int64_t micro, comm::Group& data, comm::Group& world);

}  // namespace tessera::train
