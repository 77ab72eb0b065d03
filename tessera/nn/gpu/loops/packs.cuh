// Types, sums over threads, packs of elements, and who goes over which.

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

// 16 bytes in one move, which the compiler may take apart where it makes them
// of narrower numbers.
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
