// The loops of detail/one_pass.h for GPUs, and those of optim/kernels: one pass
// over memory each.
//
// Compiled at run time by NVRTC (program.h), of which it includes nothing; and by
// the compiler of the tests, where a block's threads are threads (gpu_loops_test).
// Types:  T is that of memory, fp64, fp32 or bf16; arithmetic and sums are of
//         Wide<T>: fp64 for fp64, else fp32.
// Blocks: of kThreads threads, a warp of which sums by shuffles. What is of rows
//         has a block for each; what is of elements goes on by whole grids.
// Bits:   they do not depend on the GPU, nor on the size of the grid.

// TESSERA_GPU_THREADS: of a block, whole warps; whoever compiles says it.
constexpr int kThreads = TESSERA_GPU_THREADS, kWarp = 32,
              kWarps = kThreads / kWarp;

struct Bf16 {
  unsigned short bits;
};

template <typename T>
struct WideOf {
  using Type = float;
};
template <>
struct WideOf<double> {
  using Type = double;
};
template <typename T>
using Wide = typename WideOf<T>::Type;

__device__ inline double wide(double x) { return x; }
__device__ inline float wide(float x) { return x; }
__device__ inline float wide(Bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

__device__ inline void store(double* to, double x) { *to = x; }
__device__ inline void store(float* to, float x) { *to = x; }
// To the nearest, ties to even; what is no number stays none.
__device__ inline void store(Bf16* to, float x) {
  const unsigned bits = __float_as_uint(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  to->bits = static_cast<unsigned short>(is_nan ? 0x7fc0u : rounded >> 16);
}

template <typename W>
__device__ W sum_of_warp(W x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, mask);
  }
  return x;
}

template <typename W>
__device__ W larger(W a, W b) {
  return a > b ? a : b;
}

// Of all threads of the block, for each of them.
template <typename W>
__device__ W sum_of_block(W x) {
  __shared__ W parts[kWarps];
  x = sum_of_warp(x);
  __syncthreads();  // who reads the sum before has read it
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  W sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += parts[i];
  return sum;
}

template <typename W>
__device__ W largest_of_block(W x) {
  __shared__ W parts[kWarps];
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    x = larger(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  __syncthreads();
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  W most = parts[0];
  for (int i = 1; i < kWarps; ++i) most = larger(most, parts[i]);
  return most;
}

// y = x scale (offset + weight), scale = 1 / sqrt(mean(x^2) + eps).
template <typename T>
__device__ void rms_norm(const T* x, const T* weight, T* y, Wide<T>* scales,
                         long long width, double eps, double offset) {
  using W = Wide<T>;
  const T* const row = x + blockIdx.x * width;
  W squares = 0;
  for (long long i = threadIdx.x; i < width; i += kThreads) {
    const W value = wide(row[i]);
    squares += value * value;
  }
  const W scale =
      1 / sqrt(sum_of_block(squares) / static_cast<W>(width) +
               static_cast<W>(eps));
  for (long long i = threadIdx.x; i < width; i += kThreads) {
    store(y + blockIdx.x * width + i,
          wide(row[i]) * scale * (static_cast<W>(offset) + wide(weight[i])));
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// With g = dy (offset + weight): dx = scale g - scale^3 x mean(g x), with `past`
// added unless it is null.
template <typename T>
__device__ void rms_norm_backward(const T* dy, const T* x, const T* weight,
                                  const Wide<T>* scales, const T* past, T* dx,
                                  long long width, double offset) {
  using W = Wide<T>;
  const long long first = blockIdx.x * width;
  const auto g = [&](long long i) {
    return wide(dy[first + i]) * (static_cast<W>(offset) + wide(weight[i]));
  };
  W along = 0;
  for (long long i = threadIdx.x; i < width; i += kThreads) {
    along += g(i) * wide(x[first + i]);
  }
  const W scale = scales[blockIdx.x];
  const W back =
      scale * scale * scale * sum_of_block(along) / static_cast<W>(width);
  for (long long i = threadIdx.x; i < width; i += kThreads) {
    W value = scale * g(i) - back * wide(x[first + i]);
    if (past) value += wide(past[first + i]);
    store(dx + first + i, value);
  }
}

// Sums over rows of dy x scale, by parts of `rows_a_part` rows: (parts, width).
// A block has kWarp columns of a part (blockIdx.y).
template <typename T>
__device__ void rms_norm_weight(const T* dy, const T* x, const Wide<T>* scales,
                                Wide<T>* parts, long long rows,
                                long long rows_a_part, long long width) {
  using W = Wide<T>;
  __shared__ W sums[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const long long column = blockIdx.x * static_cast<long long>(kWarp) + lane;
  const long long begin = blockIdx.y * rows_a_part;
  const long long end = begin + rows_a_part < rows ? begin + rows_a_part : rows;
  W sum = 0;
  for (long long r = begin + warp; r < end && column < width; r += kWarps) {
    sum += wide(dy[r * width + column]) * wide(x[r * width + column]) * scales[r];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= width) return;
  for (int i = 1; i < kWarps; ++i) sum += sums[i][lane];
  parts[blockIdx.y * width + column] = sum;
}

// Elements of this thread, of `count`.
template <typename Each>
__device__ void for_each_element(long long count, Each each) {
  const long long stride = static_cast<long long>(gridDim.x) * kThreads;
  for (long long i = blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x;
       i < count; i += stride) {
    each(i);
  }
}

template <typename W>
__device__ W sigmoid(W x) {
  return 1 / (1 + exp(-x));
}

// tanh(sqrt(2 / pi) (x + 0.044715 x^3)), and its argument's slope.
template <typename W>
__device__ W gelu_tanh(W x, W* slope) {
  const W a = static_cast<W>(0.7978845608028654), b = static_cast<W>(0.044715);
  *slope = a * (1 + 3 * b * x * x);
  return tanh(a * (x + b * x * x * x));
}

// y = silu(gate) up, or gelu(gate) up.
template <typename T>
__device__ void glu(bool is_silu, const T* gate, const T* up, T* y,
                    long long count) {
  using W = Wide<T>;
  for_each_element(count, [&](long long i) {
    const W x = wide(gate[i]);
    W slope = 0;
    const W gated = is_silu ? x * sigmoid(x)
                            : x * (1 + gelu_tanh(x, &slope)) / 2;
    store(y + i, gated * wide(up[i]));
  });
}

template <typename T>
__device__ void glu_backward(bool is_silu, const T* dy, const T* gate,
                             const T* up, T* dgate, T* dup, long long count) {
  using W = Wide<T>;
  for_each_element(count, [&](long long i) {
    const W x = wide(gate[i]), g = wide(dy[i]);
    W gated = 0, slope = 0;
    if (is_silu) {
      const W s = sigmoid(x);
      gated = x * s;
      slope = s * (1 + x * (1 - s));
    } else {
      W inner = 0;
      const W t = gelu_tanh(x, &inner);
      gated = x * (1 + t) / 2;
      slope = (1 + t + x * (1 - t * t) * inner) / 2;
    }
    store(dgate + i, g * wide(up[i]) * slope);
    store(dup + i, g * gated);
  });
}

// Pairs of x (B, T, H, E), half a head apart, turned by the angles of their
// token: cos, sin (T, E / 2).
template <typename T>
__device__ void rotate(const T* x, const Wide<T>* cos, const Wide<T>* sin, T* y,
                       long long count, long long tokens, long long heads,
                       long long half, double direction) {
  using W = Wide<T>;
  for_each_element(count, [&](long long pair) {
    const long long lane = pair % half, head = pair / half;
    const long long at = head * 2 * half + lane;
    const long long angle = head / heads % tokens * half + lane;
    const W a = wide(x[at]), b = wide(x[at + half]);
    const W c = cos[angle], s = sin[angle] * static_cast<W>(direction);
    store(y + at, a * c - b * s);
    store(y + at + half, b * c + a * s);
  });
}

// Of a row of logits its cross-entropy, which is 0 where nothing is the target;
// where it is `scaled` they become the gradient of `scale` times it. A target
// outside of the row makes both no number.
template <typename T>
__device__ void cross_entropy(T* logits, const long long* targets,
                              long long ignored, double* losses,
                              long long width, int scaled, double scale) {
  using W = Wide<T>;
  T* const row = logits + blockIdx.x * width;
  const long long target = targets[blockIdx.x];
  const bool counts = target != ignored;
  const bool is_there = target >= 0 && target < width;
  W most = wide(row[0]);
  for (long long i = threadIdx.x; i < width; i += kThreads) {
    most = larger(most, wide(row[i]));
  }
  most = largest_of_block(most);
  W sum = 0;
  for (long long i = threadIdx.x; i < width; i += kThreads) {
    sum += exp(wide(row[i]) - most);
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) {
    losses[blockIdx.x] =
        !counts    ? 0.0
        : is_there ? static_cast<double>(most) + log(static_cast<double>(sum)) -
                         static_cast<double>(wide(row[target]))
                   : __longlong_as_double(0x7ff8000000000000LL);
  }
  if (!scaled) return;
  __syncthreads();  // the target's logit was read
  const W by = counts ? static_cast<W>(scale) : 0;
  for (long long i = threadIdx.x; i < width; i += kThreads) {
    const W p = counts ? exp(wide(row[i]) - most) / sum : 0;
    W value = (p - (i == target ? 1 : 0)) * by;
    if (counts && !is_there) value = static_cast<W>(losses[blockIdx.x]);
    store(row + i, value);
  }
}

// The numbers of Adam's step, alike for all elements: AdamNumbers of
// optim/kernels/kernels.h.
struct AdamNumbers {
  double gradient_scale, decay_in_gradient, kept, beta1, beta2, of_gradient,
      of_square, step_size, root_scale, eps;
};

// rounded may be null.
template <typename T>
__device__ void adam(Wide<T>* parameter, const T* gradient, Wide<T>* exp_avg,
                     Wide<T>* exp_avg_sq, Bf16* rounded, long long count,
                     const AdamNumbers& of) {
  using W = Wide<T>;
  const W scale = static_cast<W>(of.gradient_scale),
          decay = static_cast<W>(of.decay_in_gradient),
          kept = static_cast<W>(of.kept), beta1 = static_cast<W>(of.beta1),
          beta2 = static_cast<W>(of.beta2),
          of_gradient = static_cast<W>(of.of_gradient),
          of_square = static_cast<W>(of.of_square),
          step_size = static_cast<W>(of.step_size),
          root_scale = static_cast<W>(of.root_scale),
          eps = static_cast<W>(of.eps);
  for_each_element(count, [&](long long i) {
    const W p = parameter[i];
    const W g = wide(gradient[i]) * scale + decay * p;
    const W m = beta1 * exp_avg[i] + of_gradient * g;
    const W v = beta2 * exp_avg_sq[i] + of_square * (g * g);
    const W updated = p * kept - step_size * m / (sqrt(v) * root_scale + eps);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    parameter[i] = updated;
    if (rounded != nullptr) store(rounded + i, static_cast<float>(updated));
  });
}

// parts[block] = the sum of squares of what the block goes over.
template <typename T>
__device__ void squares(const T* x, double* parts, long long count) {
  double sum = 0;
  for_each_element(count, [&](long long i) {
    const double value = static_cast<double>(wide(x[i]));
    sum += value * value;
  });
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// What is launched, of each type; its arguments in this order.
#define TESSERA_GPU_LOOPS(T, type)                                             \
  extern "C" __global__ void __launch_bounds__(kThreads) rms_norm_##type(      \
      const T* x, const T* weight, T* y, Wide<T>* scales, long long width,     \
      double eps, double offset) {                                             \
    rms_norm<T>(x, weight, y, scales, width, eps, offset);                     \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads)                       \
      rms_norm_backward_##type(const T* dy, const T* x, const T* weight,       \
                               const Wide<T>* scales, const T* past, T* dx,    \
                               long long width, double offset) {               \
    rms_norm_backward<T>(dy, x, weight, scales, past, dx, width, offset);      \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) rms_norm_weight_##type( \
      const T* dy, const T* x, const Wide<T>* scales, Wide<T>* parts,          \
      long long rows, long long rows_a_part, long long width) {                \
    rms_norm_weight<T>(dy, x, scales, parts, rows, rows_a_part, width);        \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) glu_##type(           \
      int is_silu, const T* gate, const T* up, T* y, long long count) {        \
    glu<T>(is_silu != 0, gate, up, y, count);                                  \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) glu_backward_##type(  \
      int is_silu, const T* dy, const T* gate, const T* up, T* dgate, T* dup,  \
      long long count) {                                                       \
    glu_backward<T>(is_silu != 0, dy, gate, up, dgate, dup, count);            \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) rotate_##type(        \
      const T* x, const Wide<T>* cos, const Wide<T>* sin, T* y,                \
      long long count, long long tokens, long long heads, long long half,      \
      double direction) {                                                      \
    rotate<T>(x, cos, sin, y, count, tokens, heads, half, direction);          \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) cross_entropy_##type( \
      T* logits, const long long* targets, long long ignored, double* losses,  \
      long long width, int scaled, double scale) {                             \
    cross_entropy<T>(logits, targets, ignored, losses, width, scaled, scale);  \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) adam_##type(          \
      Wide<T>* parameter, const T* gradient, Wide<T>* exp_avg,                 \
      Wide<T>* exp_avg_sq, Bf16* rounded, long long count, AdamNumbers of) {   \
    adam<T>(parameter, gradient, exp_avg, exp_avg_sq, rounded, count, of);     \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) squares_##type(       \
      const T* x, double* parts, long long count) {                            \
    squares<T>(x, parts, count);                                               \
  }

TESSERA_GPU_LOOPS(double, f64)
TESSERA_GPU_LOOPS(float, f32)
TESSERA_GPU_LOOPS(Bf16, bf16)
