// Experts' rows, and the gradients of experts' weights.

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
