// Adam's update, and squares of the norm.

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
