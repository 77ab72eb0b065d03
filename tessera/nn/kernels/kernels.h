// The loops of detail/cpu_kernels.h, compiled once for each set of vectors:
// over rows of one thread.
//
// Sources that include this are compiled for machines that may not be the one
// that starts the program: they include nothing whose inline functions others
// use too, for the linker keeps one copy of those.
#pragma once

#include <cstdint>

namespace tessera::nn::kernels {

// Of tensors; sums and factors are of Wide: fp64 for fp64, else fp32.
enum class Element { kF64, kF32, kBF16 };

struct Kernels {
  const char* name;
  // y = x * scale * weight, scale[r] = 1 / rms(x[r]).
  void (*rms_norm)(Element element, const void* x, const void* weight, void* y,
                   void* scales, int64_t rows, int64_t width, double eps);
  // dx, with `past` added unless it is null; adds to dweight (width), of Wide.
  void (*rms_norm_backward)(Element element, const void* dy, const void* x,
                            const void* weight, const void* scales,
                            const void* past, void* dx, void* dweight,
                            int64_t rows, int64_t width);
  // Heads of one token: cos, sin of Wide (width / 2); `direction` 1 or -1.
  void (*rotate)(Element element, const void* x, const void* cos,
                 const void* sin, void* y, int64_t heads, int64_t width,
                 double direction);
  // y = silu(gate) * up.
  void (*swiglu)(Element element, const void* gate, const void* up, void* y,
                 int64_t count);
  void (*swiglu_backward)(Element element, const void* dy, const void* gate,
                          const void* up, void* dgate, void* dup,
                          int64_t count);
  // losses[r] = log(sum e^z) - z[target], 0 where the target is negative. Then,
  // unless `scale` is null, z = (softmax(z) - onehot(target)) * scale, or 0.
  void (*cross_entropy)(Element element, void* z, const int64_t* targets,
                        double* losses, int64_t rows, int64_t width,
                        const double* scale);
};

// Elsewhere than on x86-64 all three are the first.
extern const Kernels kBaseline, kAvx2, kAvx512;
// By core/vectors.h's Vectors.
inline constexpr const Kernels* kByVectors[] = {&kBaseline, &kAvx2, &kAvx512};

}  // namespace tessera::nn::kernels
