// Element-wise reduction of several buffers, in their order.
//
// fp16 and bf16 are accumulated in fp32 and rounded once. Integers wrap. NaN
// wins in min and max. bool has min and max (and, or). The result of an element
// depends on its inputs and their order alone, never on where it lies.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

#include "tessera/comm/group.h"

namespace tessera::comm {

// Throws TS_CHECK where `op` is not defined for `dtype`.
void check_reducible(at::ScalarType dtype, ReduceOp op);

// output[i] = inputs[0][i] op inputs[1][i] op ...; `output` may be one of them.
// REQUIRES: check_reducible passed; every buffer holds `numel` elements.
void reduce(std::span<const void* const> inputs, void* output, int64_t numel,
            at::ScalarType dtype, ReduceOp op);

}  // namespace tessera::comm
