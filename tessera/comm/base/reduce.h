// Element-wise reduction of several buffers, in their order, and copies: with
// the widest vectors that the machine has (AVX-512, AVX2, NEON; chosen when
// first used).
//
// fp16 and bf16 are accumulated in fp32 and rounded once. Integers wrap. NaN
// wins in min and max. bool has min and max (and, or). The result of an element
// depends on its inputs and their order alone, never on where it lies, nor on
// the vectors.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

#include "tessera/comm/group.h"

namespace tessera::comm {

// How results are written. kStreaming goes past the caches: right for lines
// that a far core holds or will read, wrong for those that this core reads
// next. kAskedAhead has the core ask for a line to write to before it comes to
// it, for those that another core holds. Hints: where addresses or the
// processor do not allow it, stores are ordinary.
enum class Stores { kOrdinary, kStreaming, kAskedAhead };

// Throws TS_CHECK where `op` is not defined for `dtype`.
void check_reducible(at::ScalarType dtype, ReduceOp op);

// output[i] = inputs[0][i] op inputs[1][i] op ..., the same in every output;
// an output may be one of the inputs.
// REQUIRES: check_reducible passed; every buffer holds `numel` elements.
void reduce(std::span<const void* const> inputs, std::span<void* const> outputs,
            int64_t numel, at::ScalarType dtype, ReduceOp op,
            Stores stores = Stores::kOrdinary);
void reduce(std::span<const void* const> inputs, void* output, int64_t numel,
            at::ScalarType dtype, ReduceOp op);

// memcpy, with a choice of stores. The buffers do not overlap.
void copy_bytes(void* to, const void* from, int64_t bytes,
                Stores stores = Stores::kOrdinary);

}  // namespace tessera::comm
