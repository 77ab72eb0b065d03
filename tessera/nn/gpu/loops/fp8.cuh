// Rows and columns rounded to fp8.

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
// x: rows of `width`, `stride` apart; values: (rows, width), scales: one of a
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
