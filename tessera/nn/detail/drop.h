// What masks of nn/dropout.h leave of tensors that are not on the CPU: by a
// loop of gpu/, or by operators of LibTorch where there is none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/nn/dropout.h"

namespace tessera::nn::detail {

// Of the masks that are for x: their first row and column.
struct MaskPlace {
  int64_t first_row = 0, first_column = 0;
};

// y = what is kept of x, with `past` added where it is defined.
// x: (B, H, T, D), of the samples and heads from the dropout's first ones on;
// contiguous, but that samples may lie apart. past and y lie as x does; y may
// be x.
void drop_there(const at::Tensor& past, const at::Tensor& x,
                const at::Tensor& y, const Dropout& dropout,
                const MaskPlace& place);

}  // namespace tessera::nn::detail
