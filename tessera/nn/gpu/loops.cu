// The loops of detail/one_pass.h for GPUs, and those of optim/kernels: one pass
// over memory each.
//
// Compiled at run time by NVRTC (program.h), of which it includes nothing; and
// by the tests' compiler, where a block's threads are threads
// (gpu_loops_slow_test).
// Types:  T is that of memory, fp64, fp32 or bf16; arithmetic and sums are of
//         Wide<T>: fp64 for fp64, else fp32.
// Blocks: of kThreads threads, a warp of which sums by shuffles. What is of
//         rows has a block for each, or a warp where they are short; what is
//         of elements goes on by whole grids.
// Moves:  16 bytes at a time where rows begin and end so (Pack).
// Bits:   the same from run to run on one kind of GPU.

#include "loops/packs.cuh"
#include "loops/norms.cuh"
#include "loops/expert_rows.cuh"
#include "loops/columns.cuh"
#include "loops/fp8.cuh"
#include "loops/gates.cuh"
#include "loops/rotary.cuh"
#include "loops/cross_entropy.cuh"
#include "loops/dropout.cuh"
#include "loops/updates.cuh"

// What is launched, of each type; its arguments in this order. Norms: by teams
// that fit a row (one_pass.cpp), each a kernel, that none has the registers of
// another.
#define TESSERA_GPU_NORMS(T, type, team, of, near)                             \
  extern "C" __global__ void __launch_bounds__(kThreads)                       \
      rms_norm_##team##_##near##_##type(const T* x, NormOf<T> by, T* y,        \
                                      Wide<T>* scales, double eps) {           \
    norm<false, of, near>(x, by, y, static_cast<Wide<T>*>(nullptr), scales,    \
                          eps);                                                \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads)                       \
      layer_norm_##team##_##near##_##type(const T* x, NormOf<T> by, T* y,      \
                                        Wide<T>* means, Wide<T>* scales,       \
                                        double eps) {                          \
    norm<true, of, near>(x, by, y, means, scales, eps);                        \
  }

#define TESSERA_GPU_NORM_GRADIENTS(T, type, team, of, near)                    \
  extern "C" __global__ void __launch_bounds__(kThreads)                       \
      rms_norm_backward_##team##_##near##_##type(                              \
          const T* dy, const T* x, NormOf<T> by, const Wide<T>* scales,        \
          const T* past, T* dx, Wide<T>* parts, long long rows_a_part) {       \
    norm_backward<false, of, near>(                                            \
        dy, x, by, static_cast<const Wide<T>*>(nullptr), scales, past, dx,     \
        parts, parts, rows_a_part);                                            \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads)                       \
      layer_norm_backward_##team##_##near##_##type(                            \
          const T* dy, const T* x, NormOf<T> by, const Wide<T>* means,         \
          const Wide<T>* scales, const T* past, T* dx, Wide<T>* parts,         \
          Wide<T>* bias_parts, long long rows_a_part) {                        \
    norm_backward<true, of, near>(dy, x, by, means, scales, past, dx, parts,   \
                                  bias_parts, rows_a_part);                    \
  }

#define TESSERA_GPU_LOOPS(T, type)                                             \
  TESSERA_GPU_NORMS(T, type, warp, kWarp, 2)                                   \
  TESSERA_GPU_NORMS(T, type, warp, kWarp, 4)                                   \
  TESSERA_GPU_NORMS(T, type, block, kThreads, 1)                               \
  TESSERA_GPU_NORMS(T, type, block, kThreads, 2)                               \
  TESSERA_GPU_NORMS(T, type, block, kThreads, 4)                               \
  TESSERA_GPU_NORM_GRADIENTS(T, type, warp, kWarp, 2)                          \
  TESSERA_GPU_NORM_GRADIENTS(T, type, half, kThreads / 2, 1)                   \
  TESSERA_GPU_NORM_GRADIENTS(T, type, block, kThreads, 1)                      \
  TESSERA_GPU_NORM_GRADIENTS(T, type, block, kThreads, 2)                      \
  TESSERA_GPU_NORM_GRADIENTS(T, type, block, kThreads, 4)                      \
  extern "C" __global__ void __launch_bounds__(kThreads) add_up_rows_##type(   \
      const T* rows, const long long* row, const Wide<T>* weights, T* y,       \
      long long tokens, long long choices, long long count, long long width,   \
      int teams) {                                                             \
    add_up_rows<T>(rows, row, weights, y, tokens, choices, count, width,       \
                   teams);                                                     \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads)                       \
      add_up_rows_backward_##type(                                             \
          const T* dy, const T* rows, const long long* row,                    \
          const Wide<T>* weights, T* drows, Wide<T>* dweights,                 \
          long long tokens, long long choices, long long count,                \
          long long width, int teams) {                                        \
    add_up_rows_backward<T>(dy, rows, row, weights, drows, dweights, tokens,   \
                            choices, count, width, teams);                     \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) column_sums_##type(   \
      const T* x, Wide<T>* parts, long long rows, long long rows_a_part,       \
      long long width, int in_packs) {                                         \
    column_sums<T>(x, parts, rows, rows_a_part, width, in_packs);              \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) glu_##type(           \
      int is_silu, const T* gate, const T* up, T* y, long long count) {        \
    glu<T>(is_silu != 0, gate, up, y, count);                                  \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) glu_backward_##type(  \
      int is_silu, const T* dy, const T* gate, const T* up, T* dgate, T* dup,  \
      long long count, long long width) {                                      \
    glu_backward<T>(is_silu != 0, dy, gate, up, dgate, dup, count, width);     \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) rotate_##type(        \
      const T* x, const Wide<T>* cos, const Wide<T>* sin, T* y,                \
      long long rows, long long tokens, int heads, int half,                   \
      double direction) {                                                      \
    rotate<T>(x, cos, sin, y, rows, tokens, heads, half, direction);           \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) cross_entropy_##type( \
      T* logits, const long long* targets, long long ignored, double* losses,  \
      long long width, long long stride, int scaled, double scale) {           \
    cross_entropy<T>(logits, targets, ignored, losses, width, stride, scaled,  \
                     scale);                                                   \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) adam_##type(          \
      Wide<T>* parameter, const T* gradient, Wide<T>* exp_avg,                 \
      Wide<T>* exp_avg_sq, Bf16* rounded, long long count, AdamNumbers of,     \
      const double* there, const double* pace) {                               \
    adam<T>(parameter, gradient, exp_avg, exp_avg_sq, rounded, count, of,      \
            there, pace);                                                      \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) drop_##type(          \
      const T* past, const T* x, T* y, Mask mask, DroppedRows of) {            \
    drop<T>(past, x, y, mask, of);                                             \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) squares_##type(       \
      const T* x, double* parts, long long count) {                            \
    squares<T>(x, parts, count);                                               \
  }

// TESSERA_GPU_TYPE: for whoever compiles one of them alone, its bits.
#ifndef TESSERA_GPU_TYPE
#define TESSERA_GPU_TYPE 0
#endif
#if TESSERA_GPU_TYPE == 0 || TESSERA_GPU_TYPE == 64
TESSERA_GPU_LOOPS(double, f64)
#endif
#if TESSERA_GPU_TYPE == 0 || TESSERA_GPU_TYPE == 32
TESSERA_GPU_LOOPS(float, f32)
#endif
#if TESSERA_GPU_TYPE == 0 || TESSERA_GPU_TYPE == 16
TESSERA_GPU_LOOPS(Bf16, bf16)

extern "C" __global__ void __launch_bounds__(kThreads)
    take_groups_bf16(float* gradient, const Bf16* all, const int* ends,
                     long long width, long long blocks, int adds) {
  take_groups(gradient, all, ends, width, blocks, adds != 0);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    fp8_rows_bf16(const Bf16* x, unsigned char* values, float* scales,
                  long long rows, long long width, long long stride,
                  int teams) {
  fp8_rows(x, values, scales, rows, width, stride, teams);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    largest_of_columns_bf16(const Bf16* x, float* parts, long long rows,
                            long long rows_a_part, long long width,
                            int in_packs) {
  largest_of_columns(x, parts, rows, rows_a_part, width, in_packs);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    fp8_columns_bf16(const Bf16* x, const float* most, unsigned char* values,
                     float* scales, long long rows, long long width) {
  fp8_columns(x, most, values, scales, rows, width);
}
#endif
