// Sums over rows.

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
