// The loops of detail/one_pass.h for GPUs, and those of optim/kernels: one pass
// over memory each.
//
// Compiled at run time by NVRTC (program.h), of which it includes nothing; and
// by the tests' compiler, where a block's threads are threads (gpu_loops_test).
// Types:  T is that of memory, fp64, fp32 or bf16; arithmetic and sums are of
//         Wide<T>: fp64 for fp64, else fp32.
// Blocks: of kThreads threads, a warp of which sums by shuffles. What is of
//         rows has a block for each, or a warp where they are short; what is
//         of elements goes on by whole grids.
// Moves:  16 bytes at a time where rows begin and end so (Pack).
// Bits:   the same from run to run on one kind of GPU.

// TESSERA_GPU_THREADS: of a block, whole warps; whoever compiles says it.
#ifdef __CUDACC__
#define TESSERA_UNROLL _Pragma("unroll")
#else
#define TESSERA_UNROLL
#endif

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

// b where a is no number.
template <typename W>
__device__ W larger(W a, W b) {
  return a > b ? a : b;
}

// Of each of these numbers over so many warps side by side, for each of their
// threads. All of the block's come here.
template <int warps, typename W, int count>
__device__ void sum_of_warps(W (&x)[count]) {
  __shared__ W parts[count][kWarps];
  for (int i = 0; i < count; ++i) x[i] = sum_of_warp(x[i]);
  __syncthreads();  // who reads the sums before has read them
  const int warp = threadIdx.x / kWarp, first = warp / warps * warps;
  if (threadIdx.x % kWarp == 0) {
    for (int i = 0; i < count; ++i) parts[i][warp] = x[i];
  }
  __syncthreads();
  for (int i = 0; i < count; ++i) {
    x[i] = 0;
    for (int w = 0; w < warps; ++w) x[i] += parts[i][first + w];
  }
}

template <typename W>
__device__ W largest_of_warp(W x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    x = larger(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  return x;
}

// Of all threads of the block, for each of them.
template <typename W>
__device__ W sum_of_block(W x) {
  W sum[1] = {x};
  sum_of_warps<kWarps>(sum);
  return sum[0];
}

template <typename W>
__device__ W largest_of_block(W x) {
  __shared__ W parts[kWarps];
  x = largest_of_warp(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  W most = parts[0];
  for (int i = 1; i < kWarps; ++i) most = larger(most, parts[i]);
  return most;
}

// So many elements side by side, in one move of 16 bytes where they are more
// than one and that is their size.
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
  T of[N];
};
template <typename T>
constexpr int kPack = 16 / sizeof(T);
template <int N>
struct Size {};  // of a pack, as a type

template <int N, typename T>
__device__ Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

// 16 bytes in one move, which the compiler may take apart where it makes them of
// narrower numbers.
__device__ inline void store_words(void* to, unsigned a, unsigned b, unsigned c,
                                   unsigned d) {
#ifdef __CUDACC__
  asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
#else
  const unsigned words[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) static_cast<unsigned*>(to)[i] = words[i];
#endif
}

__device__ inline unsigned word_of(Bf16 first, Bf16 second) {
  return first.bits | static_cast<unsigned>(second.bits) << 16;
}
template <int N, typename T>
__device__ void store_pack(T* to, const Pack<T, N>& pack) {
  if constexpr (sizeof(T) == sizeof(Bf16) && N == kPack<Bf16>) {
    store_words(to, word_of(pack.of[0], pack.of[1]),
                word_of(pack.of[2], pack.of[3]),
                word_of(pack.of[4], pack.of[5]),
                word_of(pack.of[6], pack.of[7]));
  } else if constexpr (sizeof(T) == sizeof(float) && N > kPack<float>) {
    for (int i = 0; i < N; i += 4) {
      store_words(to + i, __float_as_uint(pack.of[i]),
                  __float_as_uint(pack.of[i + 1]),
                  __float_as_uint(pack.of[i + 2]),
                  __float_as_uint(pack.of[i + 3]));
    }
  } else {
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
  }
}

template <typename T>
__device__ bool is_aligned(const T* at) {
  return reinterpret_cast<unsigned long long>(at) % 16 == 0;
}

// Whether rows of `width` from here on can be read in packs; null can.
template <typename T, typename... More>
__device__ bool takes_packs(long long width, const T* first,
                            const More*... more) {
  return width % kPack<T> == 0 && is_aligned(first) &&
         (is_aligned(more) && ...);
}

// Who has a row together: a block, a part of one, or a warp; threads. Where it
// is no warp all teams of a block sum as often.
template <int of>
struct Team {
  static constexpr int kSize = of, kInBlock = kThreads / of;
  __device__ static int member() { return threadIdx.x % of; }
  __device__ static long long number() {
    return blockIdx.x * static_cast<long long>(kInBlock) + threadIdx.x / of;
  }
  template <typename W, int count>
  __device__ static void sum(W (&x)[count]) {
    if constexpr (of == kWarp) {
      for (int i = 0; i < count; ++i) x[i] = sum_of_warp(x[i]);
    } else {
      sum_of_warps<of / kWarp>(x);
    }
  }
  template <typename W>
  __device__ static W sum(W x) {
    W all[1] = {x};
    sum(all);
    return all[0];
  }
  template <typename W>
  __device__ static W largest(W x) {
    if constexpr (of == kWarp) {
      return largest_of_warp(x);
    } else {
      static_assert(of == kThreads, "asked of whole blocks alone");
      return largest_of_block(x);
    }
  }
};

// A member's packs of a row that has `count`: near(place, i) of the first
// kNear, which may keep something of each in a register, far(place) of the
// others.
template <typename Of, int kNear, typename Near, typename Far>
__device__ void for_packs(int count, Near near, Far far) {
  TESSERA_UNROLL for (int i = 0; i < kNear; ++i) {
    const int p = Of::member() + i * Of::kSize;
    if (p < count) near(p, i);
  }
  for (int p = Of::member() + kNear * Of::kSize; p < count; p += Of::kSize) {
    far(p);
  }
}

// What a norm reads of its layer; of RMSNorm there is no bias, and of LayerNorm
// no offset.
template <typename T>
struct NormOf {
  const T *weight, *bias;
  double offset;
  long long rows, width;
};

// RMSNorm:   y = x' (offset + weight), x' = x scale,
//            scale = 1 / sqrt(mean(x^2) + eps).
// LayerNorm: y = x' weight + bias, x' = (x - mean) scale,
//            scale = 1 / sqrt(mean((x - mean)^2) + eps).
template <bool centred, int N, typename Of, int kNear, typename T>
__device__ void norm_by(const T* x, const NormOf<T>& by, T* y, Wide<T>* means,
                        Wide<T>* scales, double eps) {
  using W = Wide<T>;
  const long long r = Of::number();
  const bool is_row = r < by.rows;
  const long long begin = is_row ? r * by.width : 0;
  const int count = is_row ? static_cast<int>(by.width) / N : 0;
  const W width = static_cast<W>(by.width), offset = static_cast<W>(by.offset);
  Pack<T, N> row[kNear];
  for_packs<Of, kNear>(
      count, [&](int p, int i) { row[i] = load<N>(x + begin + p * N); },
      [](int) {});
  const auto mean_of = [&](auto number) {
    W sum = 0;
    const auto add = [&](const Pack<T, N>& pack) {
      for (int i = 0; i < N; ++i) sum += number(wide(pack.of[i]));
    };
    for_packs<Of, kNear>(
        count, [&](int, int i) { add(row[i]); },
        [&](int p) { add(load<N>(x + begin + p * N)); });
    return Of::sum(sum) / width;
  };
  const W mean = centred ? mean_of([](W value) { return value; }) : 0;
  const W square =
      mean_of([&](W value) { return (value - mean) * (value - mean); });
  const W scale = 1 / sqrt(square + static_cast<W>(eps));
  const auto give = [&](int p, const Pack<T, N>& pack) {
    const auto weight = load<N>(by.weight + p * N);
    Pack<T, N> out, bias = {};
    if constexpr (centred) bias = load<N>(by.bias + p * N);
    for (int i = 0; i < N; ++i) {
      const W normed = (wide(pack.of[i]) - mean) * scale;
      store(out.of + i, centred ? normed * wide(weight.of[i]) + wide(bias.of[i])
                                : normed * (offset + wide(weight.of[i])));
    }
    store_pack(y + begin + p * N, out);
  };
  for_packs<Of, kNear>(
      count, [&](int p, int i) { give(p, row[i]); },
      [&](int p) { give(p, load<N>(x + begin + p * N)); });
  if (!is_row || Of::member() > 0) return;
  scales[r] = scale;
  if (centred) means[r] = mean;
}

// With g = dy (offset + weight): dx = scale (g - x' mean(g x')), of LayerNorm
// also less mean(g); and `past` added unless it is null. And sums over rows of
// dy x' and, of LayerNorm, of dy: a team has `rows_a_part` rows and a row of
// `parts` (parts, width), of `bias_parts` too, for their sums, of which a
// thread keeps those of its near packs itself.
template <bool centred, int N, typename Of, int kNear, typename T>
__device__ void norm_backward_by(const T* dy, const T* x, const NormOf<T>& by,
                                 const Wide<T>* means, const Wide<T>* scales,
                                 const T* past, T* dx, Wide<T>* parts,
                                 Wide<T>* bias_parts, long long rows_a_part) {
  using W = Wide<T>;
  const W width = static_cast<W>(by.width), offset = static_cast<W>(by.offset);
  const long long begin = Of::number() * rows_a_part;
  const int packs = begin < by.rows ? static_cast<int>(by.width) / N : 0;
  W* const part = parts + Of::number() * by.width;
  W* const bias_part = bias_parts + Of::number() * by.width;
  W sums[kNear][N] = {}, bias_sums[centred ? kNear : 1][N] = {};
  Pack<T, N> weights[kNear];
  for_packs<Of, kNear>(
      packs, [&](int p, int i) { weights[i] = load<N>(by.weight + p * N); },
      [&](int p) {
        for (int i = 0; i < N; ++i) {
          part[p * N + i] = 0;
          if (centred) bias_part[p * N + i] = 0;
        }
      });
  for (long long r = begin; r < begin + rows_a_part; ++r) {
    const bool is_row = r < by.rows;
    const int count = is_row ? packs : 0;
    const T *const from = dy + r * by.width, *const row = x + r * by.width,
                  *const beside = past + r * by.width;
    const W scale = is_row ? scales[r] : 0,
            mean = centred && is_row ? means[r] : 0;
    Pack<T, N> ds[kNear], values[kNear], adds[kNear] = {};
    const auto take = [&](int p, int i) {
      ds[i] = load<N>(from + p * N);
      values[i] = load<N>(row + p * N);
      if (past) adds[i] = load<N>(beside + p * N);
    };
    for_packs<Of, kNear>(count, take, [](int) {});
    W means_of[centred ? 2 : 1] = {};  // of g x', of g
    const auto add_up = [&](const Pack<T, N>& d, const Pack<T, N>& value,
                            const Pack<T, N>& weight) {
      for (int i = 0; i < N; ++i) {
        const W g = wide(d.of[i]) * (offset + wide(weight.of[i]));
        means_of[0] += g * ((wide(value.of[i]) - mean) * scale);
        if constexpr (centred) means_of[1] += g;
      }
    };
    for_packs<Of, kNear>(
        count, [&](int, int i) { add_up(ds[i], values[i], weights[i]); },
        [&](int p) {
          add_up(load<N>(from + p * N), load<N>(row + p * N),
                 load<N>(by.weight + p * N));
        });
    Of::sum(means_of);
    for (W& each : means_of) each /= width;
    const auto give = [&](int p, const Pack<T, N>& d, const Pack<T, N>& value,
                          const Pack<T, N>& weight, const Pack<T, N>& add,
                          W* sum, W* bias_sum) {
      Pack<T, N> out;
      for (int i = 0; i < N; ++i) {
        const W g = wide(d.of[i]);
        const W normed = (wide(value.of[i]) - mean) * scale;
        W to = g * (offset + wide(weight.of[i])) - normed * means_of[0];
        if constexpr (centred) to -= means_of[1];
        to *= scale;
        if (past) to += wide(add.of[i]);
        store(out.of + i, to);
        sum[i] += g * normed;
        if (centred) bias_sum[i] += g;
      }
      store_pack(dx + r * by.width + p * N, out);
    };
    for_packs<Of, kNear>(
        count,
        [&](int p, int i) {
          give(p, ds[i], values[i], weights[i], adds[i], sums[i],
               bias_sums[centred ? i : 0]);
        },
        [&](int p) {
          Pack<T, N> add = {};
          if (past) add = load<N>(beside + p * N);
          give(p, load<N>(from + p * N), load<N>(row + p * N),
               load<N>(by.weight + p * N), add, part + p * N,
               bias_part + p * N);
        });
  }
  const auto keep = [&](int p, int i) {
    for (int k = 0; k < N; ++k) {
      part[p * N + k] = sums[i][k];
      if (centred) bias_part[p * N + k] = bias_sums[centred ? i : 0][k];
    }
  };
  for_packs<Of, kNear>(packs, keep, [](int) {});
}

// body(pack's size, team) as types, as they are for rows of which a block has
// `teams` at a time.
template <typename T, typename Body>
__device__ void for_rows(bool in_packs, int teams, Body body) {
  if (teams > 1) {
    if (in_packs) body(Size<kPack<T>>(), Team<kWarp>());
    else body(Size<1>(), Team<kWarp>());
  } else {
    if (in_packs) body(Size<kPack<T>>(), Team<kThreads>());
    else body(Size<1>(), Team<kThreads>());
  }
}

// By teams of `of` threads, who keep kNear packs of a row each.
template <bool centred, int of, int kNear, typename T>
__device__ void norm(const T* x, const NormOf<T>& by, T* y, Wide<T>* means,
                     Wide<T>* scales, double eps) {
  if (takes_packs(by.width, x, by.weight, by.bias, y)) {
    norm_by<centred, kPack<T>, Team<of>, kNear>(x, by, y, means, scales, eps);
  } else {
    norm_by<centred, 1, Team<of>, kNear>(x, by, y, means, scales, eps);
  }
}

template <bool centred, int of, int kNear, typename T>
__device__ void norm_backward(const T* dy, const T* x, const NormOf<T>& by,
                              const Wide<T>* means, const Wide<T>* scales,
                              const T* past, T* dx, Wide<T>* parts,
                              Wide<T>* bias_parts, long long rows_a_part) {
  if (takes_packs(by.width, dy, x, by.weight, past, dx)) {
    norm_backward_by<centred, kPack<T>, Team<of>, kNear>(
        dy, x, by, means, scales, past, dx, parts, bias_parts, rows_a_part);
  } else {
    norm_backward_by<centred, 1, Team<of>, kNear>(
        dy, x, by, means, scales, past, dx, parts, bias_parts, rows_a_part);
  }
}

// Of each token: y = sum over its choices of weight rows[row], where row is
// below `count`; weights may be null: each is 1.
template <int N, typename Of, typename T>
__device__ void add_up_rows_by(const T* rows, const long long* row,
                               const Wide<T>* weights, T* y, long long tokens,
                               long long choices, long long count,
                               long long width) {
  using W = Wide<T>;
  const long long t = Of::number();
  if (t >= tokens) return;
  const int packs = static_cast<int>(width) / N;
  for (int p = Of::member(); p < packs; p += Of::kSize) {
    W sum[N] = {};
    for (long long c = t * choices; c < (t + 1) * choices; ++c) {
      if (row[c] >= count) continue;
      const auto pack = load<N>(rows + row[c] * width + p * N);
      const W weight = weights ? weights[c] : 1;
      for (int i = 0; i < N; ++i) sum[i] += weight * wide(pack.of[i]);
    }
    Pack<T, N> out;
    for (int i = 0; i < N; ++i) store(out.of + i, sum[i]);
    store_pack(y + t * width + p * N, out);
  }
}

// The gradients of such rows, each of which is of one choice, and of weights.
template <int N, typename Of, typename T>
__device__ void add_up_rows_backward_by(const T* dy, const T* rows,
                                        const long long* row,
                                        const Wide<T>* weights, T* drows,
                                        Wide<T>* dweights, long long tokens,
                                        long long choices, long long count,
                                        long long width) {
  using W = Wide<T>;
  const long long t = Of::number();
  if (t >= tokens) return;
  const int packs = static_cast<int>(width) / N;
  for (long long c = t * choices; c < (t + 1) * choices; ++c) {
    const bool is_there = row[c] < count;
    W along = 0;
    for (int p = Of::member(); is_there && p < packs; p += Of::kSize) {
      const auto d = load<N>(dy + t * width + p * N),
                 of = load<N>(rows + row[c] * width + p * N);
      Pack<T, N> out;
      for (int i = 0; i < N; ++i) {
        along += wide(d.of[i]) * wide(of.of[i]);
        store(out.of + i, weights[c] * wide(d.of[i]));
      }
      store_pack(drows + row[c] * width + p * N, out);
    }
    along = Of::sum(along);
    if (Of::member() == 0) dweights[c] = along;
  }
}

template <typename T>
__device__ void add_up_rows(const T* rows, const long long* row,
                            const Wide<T>* weights, T* y, long long tokens,
                            long long choices, long long count, long long width,
                            int teams) {
  for_rows<T>(takes_packs(width, rows, y), teams,
              [&]<int N, int of>(Size<N>, Team<of>) {
                add_up_rows_by<N, Team<of>>(rows, row, weights, y, tokens,
                                            choices, count, width);
              });
}

template <typename T>
__device__ void add_up_rows_backward(const T* dy, const T* rows,
                                     const long long* row,
                                     const Wide<T>* weights, T* drows,
                                     Wide<T>* dweights, long long tokens,
                                     long long choices, long long count,
                                     long long width, int teams) {
  for_rows<T>(takes_packs(width, dy, rows, drows), teams,
              [&]<int N, int of>(Size<N>, Team<of>) {
                add_up_rows_backward_by<N, Team<of>>(dy, rows, row, weights,
                                                     drows, dweights, tokens,
                                                     choices, count, width);
              });
}

// parts[p, c] = what `join` makes, from 0, of x[r, c] over the `rows_a_part`
// rows r of part p. A block has kWarp packs of columns of a part, a warp every
// kWarps-th row.
template <int N, typename T, typename Join>
__device__ void join_columns_by(const T* x, Wide<T>* parts, long long rows,
                                long long rows_a_part, long long width,
                                Join join) {
  using W = Wide<T>;
  __shared__ W sums[kWarps][kWarp * N];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const long long packs = width / N, lots = (packs + kWarp - 1) / kWarp;
  const long long part = blockIdx.x / lots;
  const long long p = blockIdx.x % lots * kWarp + lane;
  const long long begin = part * rows_a_part;
  const long long end = begin + rows_a_part < rows ? begin + rows_a_part : rows;
  W sum[N] = {};
  for (long long r = begin + warp; r < end && p < packs; r += kWarps) {
    const auto pack = load<N>(x + r * width + p * N);
    for (int i = 0; i < N; ++i) sum[i] = join(sum[i], wide(pack.of[i]));
  }
  for (int i = 0; i < N; ++i) sums[warp][lane * N + i] = sum[i];
  __syncthreads();
  if (warp > 0 || p >= packs) return;
  for (int i = 0; i < N; ++i) {
    for (int w = 1; w < kWarps; ++w) {
      sum[i] = join(sum[i], sums[w][lane * N + i]);
    }
    parts[part * width + p * N + i] = sum[i];
  }
}

// `in_packs`: whoever launches counts blocks by it.
template <typename T, typename Join>
__device__ void join_columns(const T* x, Wide<T>* parts, long long rows,
                             long long rows_a_part, long long width,
                             int in_packs, Join join) {
  if (in_packs) {
    join_columns_by<kPack<T>>(x, parts, rows, rows_a_part, width, join);
  } else {
    join_columns_by<1>(x, parts, rows, rows_a_part, width, join);
  }
}

template <typename T>
__device__ void column_sums(const T* x, Wide<T>* parts, long long rows,
                            long long rows_a_part, long long width,
                            int in_packs) {
  join_columns(x, parts, rows, rows_a_part, width, in_packs,
               [](Wide<T> a, Wide<T> b) { return a + b; });
}

// Of |x|, where it is a number.
template <typename T>
__device__ void largest_of_columns(const T* x, Wide<T>* parts, long long rows,
                                   long long rows_a_part, long long width,
                                   int in_packs) {
  join_columns(x, parts, rows, rows_a_part, width, in_packs,
               [](Wide<T> a, Wide<T> b) { return larger(b < 0 ? -b : b, a); });
}

// fp8_product.h's rounding. Of a row whose largest number is `most`: what its
// numbers are divided by, and what they are multiplied with instead.
constexpr float kFp8Largest = 448.0f, kFp8LeastOfRow = 0x1p-100f;
__device__ inline float fp8_scale(float most) {
  return larger(most, kFp8LeastOfRow) / kFp8Largest;
}
__device__ inline float fp8_inverse(float most) {
  return kFp8Largest / larger(most, kFp8LeastOfRow);
}

// e4m3 of what is below 464: to the nearest, ties to even; what is no number
// stays none.
__device__ inline unsigned char fp8_of(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(two)
      : "f"(0.0f), "f"(x));
  return static_cast<unsigned char>(two & 0xffu);
#else
  const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
  const unsigned sign = (bits >> 24) & 0x80u;
  if (size > 0x7f800000u) return 0x7f;
  if (size < 0x3c800000u) {  // below 2^-6: in steps of 2^-9, as of 2^14 in fp32
    const float in_steps = __uint_as_float(size) + 0x1p14f;
    return static_cast<unsigned char>(
        sign | (__float_as_uint(in_steps) - __float_as_uint(0x1p14f)));
  }
  const unsigned rounded = size + 0x7ffffu + ((size >> 20) & 1u);
  // An exponent of 4 bits around 7 in place of 8 around 127.
  return static_cast<unsigned char>(sign | ((rounded - 0x3c000000u) >> 20));
#endif
}

// x: rows of `width`, `stride` apart; values: (rows, width), scales: one of each
// row.
template <int N, typename Of, typename T>
__device__ void fp8_rows_by(const T* x, unsigned char* values, float* scales,
                            long long rows, long long width,
                            long long stride) {
  const long long r = Of::number();
  if (r >= rows) return;
  const T* const row = x + r * stride;
  const int packs = static_cast<int>(width) / N;
  float most = 0;
  for (int p = Of::member(); p < packs; p += Of::kSize) {
    const auto pack = load<N>(row + p * N);
    for (int i = 0; i < N; ++i) {
      const float value = wide(pack.of[i]);
      most = larger(value < 0 ? -value : value, most);
    }
  }
  most = Of::largest(most);
  const float inverse = fp8_inverse(most);
  for (int p = Of::member(); p < packs; p += Of::kSize) {
    const auto pack = load<N>(row + p * N);
    Pack<unsigned char, N> out;
    for (int i = 0; i < N; ++i) out.of[i] = fp8_of(wide(pack.of[i]) * inverse);
    store_pack(values + r * width + p * N, out);
  }
  if (Of::member() == 0) scales[r] = fp8_scale(most);
}

template <typename T>
__device__ void fp8_rows(const T* x, unsigned char* values, float* scales,
                         long long rows, long long width, long long stride,
                         int teams) {
  for_rows<T>(takes_packs(width, x) && takes_packs(stride, x), teams,
              [&]<int N, int of>(Size<N>, Team<of>) {
                fp8_rows_by<N, Team<of>>(x, values, scales, rows, width,
                                         stride);
              });
}

// The columns of x as rows: values (width, rows), scales and `most`, the
// largest of each, (width). A block has a square of kFp8Square numbers a side,
// which goes through memory of the block, so that all moves are of packs.
// REQUIRES: rows and width are multiples of 16.
constexpr int kFp8Square = 64;
template <int N, typename T>
__device__ void fp8_columns_by(const T* x, const float* most,
                               unsigned char* values, float* scales,
                               long long rows, long long width) {
  constexpr int kOut = 16, kRow = kFp8Square + kOut;
  using Move = Pack<unsigned char, kOut>;
  __shared__ Move moves[kFp8Square * kRow / kOut];
  unsigned char* const square = moves[0].of;
  const long long across = (width + kFp8Square - 1) / kFp8Square;
  const long long r0 = blockIdx.x / across * kFp8Square;
  const long long c0 = blockIdx.x % across * kFp8Square;
  for (int t = threadIdx.x; t < kFp8Square * kFp8Square / N; t += kThreads) {
    const int r = t % kFp8Square, c = t / kFp8Square * N;
    if (r0 + r >= rows || c0 + c >= width) continue;
    const auto pack = load<N>(x + (r0 + r) * width + c0 + c);
    for (int i = 0; i < N; ++i) {
      square[(c + i) * kRow + r] =
          fp8_of(wide(pack.of[i]) * fp8_inverse(most[c0 + c + i]));
    }
  }
  __syncthreads();
  for (int t = threadIdx.x; t < kFp8Square * kFp8Square / kOut; t += kThreads) {
    const int c = t / (kFp8Square / kOut), r = t % (kFp8Square / kOut) * kOut;
    if (r0 + r >= rows || c0 + c >= width) continue;
    store_pack(values + (c0 + c) * rows + r0 + r,
               load<kOut>(square + c * kRow + r));
  }
  for (int c = threadIdx.x; c < kFp8Square && r0 == 0; c += kThreads) {
    if (c0 + c < width) scales[c0 + c] = fp8_scale(most[c0 + c]);
  }
}

template <typename T>
__device__ void fp8_columns(const T* x, const float* most,
                            unsigned char* values, float* scales,
                            long long rows, long long width) {
  if (takes_packs(width, x)) {
    fp8_columns_by<kPack<T>>(x, most, values, scales, rows, width);
  } else {
    fp8_columns_by<1>(x, most, values, scales, rows, width);
  }
}

// Of so many blocks that share elements out, this one.
struct Share {
  long long block, blocks;
};
__device__ inline Share of_all_blocks() { return {blockIdx.x, gridDim.x}; }

// Elements of this thread, of `count`.
template <typename Each>
__device__ void for_each_element(long long count, Each each,
                                 Share share = of_all_blocks()) {
  for (long long i = share.block * kThreads + threadIdx.x; i < count;
       i += share.blocks * kThreads) {
    each(i);
  }
}

// e^x and 1 / x of what is rounded to bf16: by the processor's own, to far less
// than that rounds.
__device__ inline float exp_for(Bf16, float x) { return __expf(x); }
__device__ inline float exp_for(float, float x) { return exp(x); }
__device__ inline double exp_for(double, double x) { return exp(x); }
__device__ inline float inverse_for(Bf16, float x) {
  return __fdividef(1.0f, x);
}
__device__ inline float inverse_for(float, float x) { return 1 / x; }
__device__ inline double inverse_for(double, double x) { return 1 / x; }

template <typename T>
__device__ Wide<T> sigmoid(Wide<T> x) {
  const Wide<T> power = exp_for(T(), -x);
  return inverse_for(T(), 1 + power);
}

// tanh(sqrt(2 / pi) (x + 0.044715 x^3)), and its argument's slope.
template <typename W>
__device__ W gelu_tanh(W x, W* slope) {
  const W a = static_cast<W>(0.7978845608028654), b = static_cast<W>(0.044715);
  *slope = a * (1 + 3 * b * x * x);
  return tanh(a * (x + b * x * x * x));
}

// silu(x), or gelu(x); and its slope.
template <typename T>
__device__ Wide<T> gated(bool is_silu, Wide<T> x, Wide<T>* slope) {
  using W = Wide<T>;
  if (is_silu) {
    const W s = sigmoid<T>(x);
    *slope = s * (1 + x * (1 - s));
    return x * s;
  }
  W inner = 0;
  const W t = gelu_tanh(x, &inner);
  *slope = (1 + t + x * (1 - t * t) * inner) / 2;
  return x * (1 + t) / 2;
}

// each(i, pack's size as a type) for the packs of this thread, of `count`
// elements, all of which begin where packs can.
template <typename T, typename Each>
__device__ void for_each_pack(bool in_packs, long long count, Each each,
                              Share share = of_all_blocks()) {
  constexpr int kMost = kPack<T>;
  const long long packs = in_packs ? count / kMost : 0;
  for_each_element(
      packs, [&](long long p) { each(p * kMost, Size<kMost>()); }, share);
  const long long rest = packs * kMost;
  for_each_element(
      count - rest, [&](long long i) { each(rest + i, Size<1>()); }, share);
}

// y = silu(gate) up, or gelu(gate) up.
template <typename T>
__device__ void glu(bool is_silu, const T* gate, const T* up, T* y,
                    long long count) {
  using W = Wide<T>;
  const auto each = [&]<int N>(long long at, Size<N>) {
    const auto x = load<N>(gate + at), by = load<N>(up + at);
    Pack<T, N> out;
    for (int i = 0; i < N; ++i) {
      W slope = 0;
      store(out.of + i,
            gated<T>(is_silu, wide(x.of[i]), &slope) * wide(by.of[i]));
    }
    store_pack(y + at, out);
  };
  for_each_pack<T>(takes_packs(0, gate, up, y), count, each);
}

// dgate and dup: rows of `width`, twice that apart.
template <typename T>
__device__ void glu_backward(bool is_silu, const T* dy, const T* gate,
                             const T* up, T* dgate, T* dup, long long count,
                             long long width) {
  using W = Wide<T>;
  const bool is_small = count <= 0xffffffffLL;  // divided by 32 bits
  const auto row_of = [&](long long at) {
    return is_small ? static_cast<unsigned>(at) / static_cast<unsigned>(width)
                    : at / width;
  };
  const auto each = [&]<int N>(long long at, Size<N>) {
    const auto from = load<N>(dy + at), x = load<N>(gate + at),
               by = load<N>(up + at);
    Pack<T, N> to_gate, to_up;
    for (int i = 0; i < N; ++i) {
      const W g = wide(from.of[i]);
      W slope = 0;
      const W value = gated<T>(is_silu, wide(x.of[i]), &slope);
      store(to_gate.of + i, g * wide(by.of[i]) * slope);
      store(to_up.of + i, g * value);
    }
    const long long to = at + row_of(at) * width;
    store_pack(dgate + to, to_gate);
    store_pack(dup + to, to_up);
  };
  for_each_pack<T>(takes_packs(width, dy, gate, up, dgate, dup), count, each);
}

// gradient (groups, width) += all, or = where nothing is there yet, of groups
// with rows, which end where `ends` says; of others nothing was written to
// `all`. A group has `blocks` of the blocks.
__device__ inline void take_groups(float* gradient, const Bf16* all,
                                   const int* ends, long long width,
                                   long long blocks, bool adds) {
  const long long group = blockIdx.x / blocks;
  const bool is_empty = ends[group] == (group == 0 ? 0 : ends[group - 1]);
  if (is_empty && adds) return;
  float* to = gradient + group * width;
  const Bf16* from = all + group * width;
  const auto each = [&]<int N>(long long at, Size<N>) {
    Pack<float, N> sum = {};
    if (adds) sum = load<N>(to + at);
    if (!is_empty) {
      const auto more = load<N>(from + at);
      for (int i = 0; i < N; ++i) sum.of[i] += wide(more.of[i]);
    }
    store_pack(to + at, sum);
  };
  for_each_pack<Bf16>(takes_packs(width, from, to), width, each,
                      {blockIdx.x % blocks, blocks});
}

// Pairs of x (B, T, H, E), half a head apart, turned by the angles of their
// token: cos, sin (T, E / 2). A block has the heads of one token, or of several
// where these are few.
template <int N, typename T>
__device__ void rotate_by(const T* x, const Wide<T>* cos, const Wide<T>* sin,
                          T* y, long long rows, long long tokens, int heads,
                          int half, double direction) {
  using W = Wide<T>;
  const int packs = half / N, count = heads * packs;
  const int in_block = count < kThreads ? kThreads / count : 1;
  const int thread = threadIdx.x, mine = thread / count % in_block;
  if (in_block > 1 && thread >= in_block * count) return;
  const long long stride = static_cast<long long>(gridDim.x) * in_block;
  for (long long r = static_cast<long long>(blockIdx.x) * in_block + mine;
       r < rows; r += stride) {
    const long long row = r * 2 * heads * half, angle = r % tokens * half;
    for (int p = thread - mine * count; p < count; p += kThreads) {
      const int head = p / packs, lane = (p - head * packs) * N;
      const long long at = row + 2LL * head * half + lane;
      const auto a = load<N>(x + at), b = load<N>(x + at + half);
      const auto c = load<N>(cos + angle + lane),
                 s = load<N>(sin + angle + lane);
      Pack<T, N> first, second;
      for (int i = 0; i < N; ++i) {
        const W turn = s.of[i] * static_cast<W>(direction);
        const W l = wide(a.of[i]), r = wide(b.of[i]);
        store(first.of + i, l * c.of[i] - r * turn);
        store(second.of + i, r * c.of[i] + l * turn);
      }
      store_pack(y + at, first);
      store_pack(y + at + half, second);
    }
  }
}

template <typename T>
__device__ void rotate(const T* x, const Wide<T>* cos, const Wide<T>* sin, T* y,
                       long long rows, long long tokens, int heads, int half,
                       double direction) {
  if (takes_packs(half, x, y) && is_aligned(cos) && is_aligned(sin)) {
    rotate_by<kPack<T>>(x, cos, sin, y, rows, tokens, heads, half, direction);
  } else {
    rotate_by<1>(x, cos, sin, y, rows, tokens, heads, half, direction);
  }
}

// Of a row of logits, `stride` apart, its cross-entropy, which is 0 where
// nothing is the target; where it is `scaled` they become the gradient of
// `scale` times it. A target outside of the row makes both no number.
template <typename T>
__device__ void cross_entropy(T* logits, const long long* targets,
                              long long ignored, double* losses,
                              long long width, long long stride, int scaled,
                              double scale) {
  using W = Wide<T>;
  constexpr int N = kPack<T>;
  T* const row = logits + blockIdx.x * stride;
  const int packs = is_aligned(row) ? static_cast<int>(width / N) : 0;
  const int rest = packs * N, count = static_cast<int>(width);
  const long long target = targets[blockIdx.x];
  const bool counts = target != ignored;
  const bool is_there = target >= 0 && target < width;
  // The largest that this thread has seen, and its sum of e^(x - it).
  W own_most = static_cast<W>(-3e38), own_sum = 0;
  const auto see = [&]<int M>(const Pack<T, M>& pack) {
    W now = own_most;
    for (int i = 0; i < M; ++i) now = larger(now, wide(pack.of[i]));
    if (now != own_most) own_sum *= exp_for(T(), own_most - now);
    for (int i = 0; i < M; ++i) own_sum += exp_for(T(), wide(pack.of[i]) - now);
    own_most = now;
  };
  for (int p = threadIdx.x; p < packs; p += kThreads) {
    see(load<N>(row + p * N));
  }
  for (int i = rest + threadIdx.x; i < count; i += kThreads) {
    see(load<1>(row + i));
  }
  const W most = largest_of_block(own_most);
  const W sum = sum_of_block(own_sum * exp_for(T(), own_most - most));
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
  const W part = counts ? by / sum : 0;
  const bool is_nan = counts && !is_there;
  const auto gradient = [&](W x, int i) {
    if (is_nan) return static_cast<W>(losses[blockIdx.x]);
    const W p = counts ? exp_for(T(), x - most) * part : 0;
    return i == target ? p - by : p;
  };
  for (int p = threadIdx.x; p < packs; p += kThreads) {
    auto pack = load<N>(row + p * N);
    for (int i = 0; i < N; ++i) {
      store(pack.of + i, gradient(wide(pack.of[i]), p * N + i));
    }
    store_pack(row + p * N, pack);
  }
  for (int i = rest + threadIdx.x; i < count; i += kThreads) {
    store(row + i, gradient(wide(row[i]), i));
  }
}

// Mask of nn/kernels/kernels.h.
struct Mask {
  unsigned key[2];
  unsigned drops, sample, head;
  double scale;
};

struct Words {
  unsigned of[4];
};

// core/random.h's philox4x32_10.
__device__ inline Words philox(Words words, const Mask& mask) {
  unsigned key0 = mask.key[0], key1 = mask.key[1];
  TESSERA_UNROLL for (int round = 0; round < 10; ++round) {
    const auto product0 = 0xD2511F53ull * words.of[0],
               product1 = 0xCD9E8D57ull * words.of[2];
    words = {{static_cast<unsigned>(product1 >> 32) ^ words.of[1] ^ key0,
              static_cast<unsigned>(product1),
              static_cast<unsigned>(product0 >> 32) ^ words.of[3] ^ key1,
              static_cast<unsigned>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return words;
}

// Rows of (samples, heads, tokens, width), of which samples are `stride` apart;
// the first row and column of each mask that is for them.
struct DroppedRows {
  long long rows, heads, tokens, width, stride, first_row, first_column;
};

// y = what is kept of x, with `past` added unless it is null; y may be x. A
// thread has the columns that one counter's words are for: 16 apart.
template <typename T>
__device__ void drop(const T* past, const T* x, T* y, const Mask& mask,
                     const DroppedRows& of) {
  using W = Wide<T>;
  const W scale = static_cast<W>(mask.scale);
  const long long first = of.first_column / 64 * 16;
  const long long counters =
      (of.first_column + of.width + 63) / 64 * 16 - first;
  for_each_element(of.rows * counters, [&](long long i) {
    const long long r = i / counters, c = first + i % counters;
    const long long of_heads = r / of.tokens, t = r % of.tokens;
    const long long b = of_heads / of.heads, h = of_heads % of.heads;
    const long long row = b * of.stride + (h * of.tokens + t) * of.width;
    const Words words = philox(
        {{static_cast<unsigned>(c), static_cast<unsigned>(of.first_row + t),
          static_cast<unsigned>(mask.head + h),
          static_cast<unsigned>(mask.sample + b)}},
        mask);
    TESSERA_UNROLL for (int w = 0; w < 4; ++w) {
      const long long at = c / 16 * 64 + w * 16 + c % 16 - of.first_column;
      if (at < 0 || at >= of.width) continue;
      const W kept = words.of[w] < mask.drops ? 0 : scale;
      const W before = past != nullptr ? wide(past[row + at]) : 0;
      store(y + row + at, before + wide(x[row + at]) * kept);
    }
  });
}

// The numbers of Adam's step, alike for all elements: AdamNumbers of
// optim/kernels/kernels.h.
struct AdamNumbers {
  double gradient_scale, decay_in_gradient, kept, beta1, beta2, of_gradient,
      of_square, step_size, root_scale, eps;
};

// rounded and there may be null. `there`: by which gradients count too; where
// it is no number nothing changes. `pace`: kept, step_size and root_scale, in
// place of those of `of`.
template <typename T>
__device__ void adam(Wide<T>* parameter, const T* gradient, Wide<T>* exp_avg,
                     Wide<T>* exp_avg_sq, Bf16* rounded, long long count,
                     const AdamNumbers& of, const double* there,
                     const double* pace) {
  using W = Wide<T>;
  const double more = there == nullptr ? 1.0 : *there;
  if (more != more) return;
  const W scale = static_cast<W>(of.gradient_scale * more),
          decay = static_cast<W>(of.decay_in_gradient),
          kept = static_cast<W>(pace == nullptr ? of.kept : pace[0]),
          beta1 = static_cast<W>(of.beta1), beta2 = static_cast<W>(of.beta2),
          of_gradient = static_cast<W>(of.of_gradient),
          of_square = static_cast<W>(of.of_square),
          step_size =
              static_cast<W>(pace == nullptr ? of.step_size : pace[1]),
          root_scale =
              static_cast<W>(pace == nullptr ? of.root_scale : pace[2]),
          eps = static_cast<W>(of.eps);
  const auto each = [&]<int N>(long long at, Size<N>) {
    auto p = load<N>(parameter + at), m = load<N>(exp_avg + at),
         v = load<N>(exp_avg_sq + at);
    const auto from = load<N>(gradient + at);
    Pack<Bf16, N> copy = {};
    for (int i = 0; i < N; ++i) {
      const W g = wide(from.of[i]) * scale + decay * p.of[i];
      m.of[i] = beta1 * m.of[i] + of_gradient * g;
      v.of[i] = beta2 * v.of[i] + of_square * (g * g);
      p.of[i] = p.of[i] * kept -
                step_size * m.of[i] / (sqrt(v.of[i]) * root_scale + eps);
      store(copy.of + i, static_cast<float>(p.of[i]));
    }
    store_pack(exp_avg + at, m);
    store_pack(exp_avg_sq + at, v);
    store_pack(parameter + at, p);
    if (rounded != nullptr) store_pack(rounded + at, copy);
  };
  const bool in_packs = takes_packs(0, gradient, rounded, parameter) &&
                        is_aligned(exp_avg) && is_aligned(exp_avg_sq);
  for_each_pack<T>(in_packs, count, each);
}

// parts[block] = the sum of squares of what the block goes over.
template <typename T>
__device__ void squares(const T* x, double* parts, long long count) {
  double sum = 0;
  const auto each = [&]<int N>(long long at, Size<N>) {
    const auto pack = load<N>(x + at);
    for (int i = 0; i < N; ++i) {
      const double value = static_cast<double>(wide(pack.of[i]));
      sum += value * value;
    }
  };
  for_each_pack<T>(takes_packs(0, x), count, each);
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

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
