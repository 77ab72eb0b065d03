// SwiGLU and GeGLU.

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
