#include "tessera/core/vectors.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "tessera/core/error.h"
#include "tessera/core/processor.h"

namespace tessera {
namespace {

Vectors of_the_processor() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") &&
                    __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Vectors::kAvx512;
  }
  if (avx2) return Vectors::kAvx2;
#endif
  return Vectors::kBaseline;
}

Vectors asked_for() {
  const char* const value = std::getenv("TESSERA_VECTORS");
  const std::string name = value ? value : "";
  if (name == "baseline") return Vectors::kBaseline;
  if (name == "avx2") return Vectors::kAvx2;
  TS_CHECK_CONFIG(name.empty() || name == "avx512", "TESSERA_VECTORS is \"",
                  name, "\". There are: baseline, avx2, avx512.");
  return Vectors::kAvx512;
}

}  // namespace

const char* name_of(Vectors vectors) {
  switch (vectors) {
    case Vectors::kBaseline:
      return "baseline";
    case Vectors::kAvx2:
      return "avx2";
    case Vectors::kAvx512:
      return "avx512";
  }
  TORCH_INTERNAL_ASSERT(false, "vectors of no name");
}

Vectors widest_vectors() {
  static const Vectors chosen = std::min(asked_for(), of_the_processor());
  return chosen;
}

bool multiplies_bf16() {
#if defined(__x86_64__)
  return widest_vectors() == Vectors::kAvx512 &&
         __builtin_cpu_supports("avx512bf16");
#else
  return true;  // LibTorch knows better
#endif
}

bool gains_by_bf16() {
#if defined(__x86_64__)
  const bool has_pairs_alone =
      is_intel() && !__builtin_cpu_supports("amx-bf16");
  return multiplies_bf16() && !has_pairs_alone;
#else
  return true;
#endif
}

std::string describe_vectors() {
  return c10::str(name_of(widest_vectors()),
                  gains_by_bf16()     ? ", bf16 arithmetic"
                  : multiplies_bf16() ? ", bf16 arithmetic as fast as fp32's"
                                      : ", no bf16 arithmetic");
}

}  // namespace tessera
