// The mean loss of a model over a fixed set of batches.
//
// Shapes: inputs and targets (B, T), of each batch its own.
// Comm:   batches are shared out in turn over the ranks of `data`; one
//         all_gather of two doubles a rank over `world` at the end. Every
//         rank evaluates as many batches as the others, since that may be
//         collective too.
#pragma once

#include <cstdint>
#include <functional>

#include "tessera/comm/group.h"
#include "tessera/data/dataset.h"
#include "tessera/engine/batch_share.h"
#include "tessera/nn/loss.h"

namespace tessera::train {

struct MeanLoss {
  double loss = 0;  // nats a token
  int64_t tokens = 0;
};

// What a rank counts of the loss of one batch.
using Evaluate = std::function<nn::LossSum(const data::Batch&)>;

struct Batches {
  int64_t count = 0;  // at least 1
  std::function<data::Batch(int64_t index)> read;
  // Told which is read next, while the one before is evaluated; may be null.
  std::function<void(int64_t index)> will_read = {};
};

// A data set's first `most` samples, `micro` at a time; most = 0: all of them.
// REQUIRES: it outlives them.
Batches validation_batches(const data::Dataset& samples, int64_t micro,
                           int64_t most);

// The same, read by the first rank of a group for all of it. `extent`: of
// `micro` samples.
// Comm: of BatchShare.
Batches shared_batches(const data::Dataset& samples,
                       const engine::BatchExtent& extent, int64_t most,
                       engine::BatchShare& share);

MeanLoss mean_loss(const Evaluate& evaluate, const Batches& batches,
                   comm::Group& data, comm::Group& world);

}  // namespace tessera::train
