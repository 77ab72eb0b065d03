// The loops of reduce.h, compiled once for each set of vectors.
//
// Sources that include this are compiled for machines that may not be the one
// that starts the program: they include nothing whose inline functions others
// use too, for the linker keeps one copy of those.
#pragma once

#include <cstdint>

namespace tessera::comm::kernels {

enum class Kind { kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8 };
enum class Op { kSum, kMean, kMin, kMax, kProduct };
inline constexpr int kNumOps = 5;

struct Job {
  const char* const* inputs;
  int64_t num_inputs;
  char* const* outputs;
  int64_t num_outputs;
  int64_t numel;
  bool streaming;
  bool asks_ahead;  // for lines of the outputs
};

struct Kernels {
  const char* name;
  void (*reduce)(const Job& job, Kind kind, Op op);
  void (*copy_streaming)(char* to, const char* from, int64_t bytes);
  void (*copy_ahead)(char* to, const char* from, int64_t bytes);
};

// Elsewhere than on x86-64 all three are the first.
extern const Kernels kBaseline, kAvx2, kAvx512;
// By core/vectors.h's Vectors.
inline constexpr const Kernels* kByVectors[] = {&kBaseline, &kAvx2, &kAvx512};

}  // namespace tessera::comm::kernels
