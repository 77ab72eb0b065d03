// The loss over logits, and their gradient.

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
