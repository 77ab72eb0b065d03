// Rotary positions.

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
