// A rank's share of a tensor that tensor parallelism cuts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "tessera/comm/group.h"

namespace tessera::wrappers {

// Equal parts of `dim`, in memory of its own; -1: all of it.
// Errors: TS_CHECK_CONFIG where it does not divide; `name` says what it is.
at::Tensor share_of(const at::Tensor& whole, int64_t dim,
                    const comm::Group& group, const std::string& name);

}  // namespace tessera::wrappers
