#include "tessera/checkpoint/detail/narrowing.h"

#include <ATen/ATen.h>

#include "tessera/core/error.h"

namespace tessera::checkpoint::detail {

at::Tensor narrowed(const at::Tensor& values, at::ScalarType dtype,
                    const std::string& name) {
  at::Tensor narrow = values.to(dtype);
  if (dtype == values.scalar_type()) return narrow;
  const at::Tensor beyond =
      values.masked_select(narrow.isinf().logical_and_(values.isfinite()));
  TS_CHECK_CONFIG(beyond.numel() == 0, name, ": ", beyond.numel(),
                  " of its numbers, up to ", beyond.abs().max().item<double>(),
                  " in magnitude, are beyond the range of the dtype that was "
                  "asked for. Write it in fp32, or in bf16.");
  return narrow;
}

}  // namespace tessera::checkpoint::detail
