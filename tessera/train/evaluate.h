// The mean loss of a model over a fixed set of samples.
//
// Shapes: samples as the data set has them: inputs and targets (B, T).
// Comm:   samples are shared out in runs of `micro` over the group's ranks; one
//         all_gather of two doubles a rank at the end.
#pragma once

#include <cstdint>

#include "tessera/comm/group.h"
#include "tessera/data/dataset.h"
#include "tessera/models/decoder.h"

namespace tessera::train {

// At most this many samples, the first ones, so that validation stays short
// beside training.
inline constexpr int64_t kMaxValidationSamples = 512;

struct MeanLoss {
  double loss = 0;  // nats a token
  int64_t tokens = 0;
};

MeanLoss mean_loss(models::Decoder& decoder, const data::Dataset& samples,
                   int64_t micro, comm::Group& group);

}  // namespace tessera::train
