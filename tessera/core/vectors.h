// The vectors that this processor computes with, for loops that are compiled
// once for each set.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace tessera {

enum class Vectors { kBaseline, kAvx2, kAvx512 };

// "baseline", "avx2" or "avx512".
const char* name_of(Vectors vectors);

// The widest that the processor has; TESSERA_VECTORS=baseline or avx2 masks
// those that are wider. Read once. Errors: TS_CHECK_CONFIG for another name.
Vectors widest_vectors();

// Whether the processor multiplies bf16 itself, beside vectors that wide.
bool multiplies_bf16();

// Whether large products of bf16 are then faster than of fp32. On Intel they
// are by tiles (AMX): pairs alone are multiplied no faster than floats, and a
// virtual machine may hide tiles.
bool gains_by_bf16();

// "avx512, bf16 arithmetic".
std::string describe_vectors();

// Of tables for each of Vectors, in their order, those that run here: the
// widest is the last.
template <typename Kernels>
std::span<const Kernels* const> that_run_here(
    const Kernels* const (&tables)[3]) {
  return std::span(tables).first(static_cast<size_t>(widest_vectors()) + 1);
}

}  // namespace tessera
