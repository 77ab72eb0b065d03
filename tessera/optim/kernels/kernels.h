// The loops of detail/adam_pass.h and gradient_norm.h, compiled once for each
// set of vectors.
//
// Sources that include this are compiled for machines that may not be the one
// that starts the program: they include nothing whose inline functions others
// use too, for the linker keeps one copy of those.
#pragma once

#include <cstdint>

namespace tessera::optim::kernels {

// Of the gradient. All else is fp64 beside fp64, else fp32.
enum class Gradient { kF64, kF32, kBF16, kF16 };
// The parameter once more, rounded.
enum class Copy { kNone, kBF16, kF16 };

// The numbers of a step, alike for all elements.
struct AdamNumbers {
  double gradient_scale;  // by which a gradient is multiplied when it is read
  double decay_in_gradient, kept;  // g + decay_in_gradient p, p * kept
  double beta1, beta2;
  double of_gradient, of_square;  // 1 - beta1, 1 - beta2
  double step_size;               // lr / (1 - beta1^t)
  double root_scale;              // 1 / sqrt(1 - beta2^t)
  double eps;
};

struct AdamArrays {
  void* parameter;
  const void* gradient;
  void *exp_avg, *exp_avg_sq;
  void* rounded;
  Copy copy = Copy::kNone;  // what `rounded` is; not beside fp64
};

struct Kernels {
  const char* name;
  void (*adam)(Gradient gradient, const AdamNumbers& numbers,
               const AdamArrays& arrays, int64_t count);
  // The sum of squares in fp64: the same bits with any vectors.
  double (*squares)(Gradient type, const void* values, int64_t count);
};

// Elsewhere than on x86-64 all three are the first.
extern const Kernels kBaseline, kAvx2, kAvx512;
// By core/vectors.h's Vectors.
inline constexpr const Kernels* kByVectors[] = {&kBaseline, &kAvx2, &kAvx512};

}  // namespace tessera::optim::kernels
