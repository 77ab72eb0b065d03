// Sums on their way through messages: fp16 and bf16 as fp32, a mean as a sum,
// until a result is known, which is divided and rounded once.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "tessera/comm/group.h"

namespace tessera::comm {

// What partial sums of a dtype are kept in.
at::ScalarType partial_dtype(at::ScalarType dtype);

// Values of `dtype` as partial sums of one rank: copied, or widened. Both may
// be one place where they are of one dtype.
void begin_partial(const void* values, void* partial, int64_t numel,
                   at::ScalarType dtype);

// The result, of `dtype`, from partial sums of all `ranks`, which it may
// overwrite; it may lie in their place where they are of one dtype.
void finish_partial(void* partial, void* result, int64_t numel,
                    at::ScalarType dtype, ReduceOp op, int64_t ranks);

}  // namespace tessera::comm
