// RMSNorm and LayerNorm.

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
