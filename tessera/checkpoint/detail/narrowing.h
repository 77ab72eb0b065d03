// The dtype in which weights are written, where it is another than theirs.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::checkpoint::detail {

// `values` in that dtype. Errors: TS_CHECK_CONFIG where a finite number would
// become an infinite one (of fp32 in fp16, above 65504); `name` says whose.
at::Tensor narrowed(const at::Tensor& values, at::ScalarType dtype,
                    const std::string& name);

}  // namespace tessera::checkpoint::detail
