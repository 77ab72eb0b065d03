#include "tessera/data/dataset.h"

#include <ATen/Functions.h>

#include <numeric>

#include "tessera/core/error.h"

namespace tessera::data {

Dataset::Dataset(TokenStream tokens, const SamplerOptions& options,
                 const std::string& name)
    : tokens_(std::move(tokens)), sampler_(tokens_.size(), options, name) {}

Batch Dataset::batch(int64_t step, int64_t first, int64_t count) const {
  return gather(sampler_.sample_indices(step, first, count));
}

Batch Dataset::in_order(int64_t first, int64_t count) const {
  TORCH_INTERNAL_ASSERT(
      first >= 0 && count >= 0 && first + count <= sampler_.num_samples(),
      "samples ", first, " + ", count, " of ", sampler_.num_samples());
  std::vector<int64_t> samples(count);
  std::iota(samples.begin(), samples.end(), first);
  return gather(samples);
}

int64_t Dataset::num_targets(int64_t step) const {
  const SamplerOptions& options = sampler_.options();
  if (tokens_.all_count()) return options.global_batch * options.seq_len;
  const Batch all = batch(step, 0, options.global_batch);
  return all.targets.ne(kNoTarget).sum().item<int64_t>();
}

Batch Dataset::gather(const std::vector<int64_t>& samples) const {
  const int64_t length = sampler_.options().seq_len;
  const auto rows = static_cast<int64_t>(samples.size());
  Batch batch{at::empty({rows, length}, at::kLong),
              at::empty({rows, length}, at::kLong)};
  std::vector<int64_t> tokens(length + 1);
  for (int64_t row = 0; row < rows; ++row) {
    tokens_.read(sampler_.first_token(samples[row]), tokens);
    std::copy(tokens.begin(), tokens.end() - 1,
              batch.inputs.data_ptr<int64_t>() + row * length);
    tokens_.hide_uncounted(sampler_.first_token(samples[row]) + 1,
                           std::span(tokens).subspan(1));
    std::copy(tokens.begin() + 1, tokens.end(),
              batch.targets.data_ptr<int64_t>() + row * length);
  }
  return batch;
}

}  // namespace tessera::data
