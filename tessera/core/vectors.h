// The vectors that this processor computes with, for loops that are compiled
// once for each set.
#pragma once

namespace tessera {

enum class Vectors { kBaseline, kAvx2, kAvx512 };

// The widest that the processor has; TESSERA_VECTORS=baseline or avx2 masks
// those that are wider. Read once. Errors: TS_CHECK_CONFIG for another name.
Vectors widest_vectors();

// The table for them.
template <typename Kernels>
const Kernels* for_this_processor(const Kernels* baseline, const Kernels* avx2,
                                  const Kernels* avx512) {
  switch (widest_vectors()) {
    case Vectors::kAvx512:
      return avx512;
    case Vectors::kAvx2:
      return avx2;
    case Vectors::kBaseline:
      break;
  }
  return baseline;
}

}  // namespace tessera
