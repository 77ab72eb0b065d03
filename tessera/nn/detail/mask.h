// A mask of nn/dropout.h for the loops of kernels/.
#pragma once

#include <cmath>
#include <cstdint>

#include "tessera/core/error.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/kernels/kernels.h"

namespace tessera::nn::detail {

// Of sample `b` and head `h` of those that are here.
inline kernels::Mask mask_of(const Dropout& dropout, int64_t b, int64_t h) {
  TS_CHECK(dropout.rate < 1, "dropout: of a rate of ", dropout.rate,
           " nothing is kept.");
  return {.key = {dropout.key[0], dropout.key[1]},
          .drops = static_cast<uint32_t>(std::ldexp(dropout.rate, 32)),
          .sample = static_cast<uint32_t>(dropout.first_sample + b),
          .head = static_cast<uint32_t>(dropout.first_head + h),
          .scale = 1 / (1 - dropout.rate)};
}

}  // namespace tessera::nn::detail
