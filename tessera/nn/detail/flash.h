// flash_attention.h by the loops of one set of vectors.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "tessera/nn/flash_attention.h"
#include "tessera/nn/kernels/kernels.h"

namespace tessera::nn::detail {

// (out, lse)
std::tuple<at::Tensor, at::Tensor> flash_forward(const kernels::Kernels& by,
                                                 const at::Tensor& q,
                                                 const at::Tensor& k,
                                                 const at::Tensor& v,
                                                 const FlashRuns& runs = {});

// (dq, dk, dv); gradient: of out, as (B, T, H, E) with E contiguous.
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const kernels::Kernels& by, const at::Tensor& gradient, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
    const at::Tensor& lse, const FlashRuns& runs = {});

}  // namespace tessera::nn::detail
