#include "tessera/data/dataset.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tessera/core/error.h"
#include "tessera/core/ignore_index.h"
#include "tessera/data/ahead.h"

namespace tessera::data {

namespace {

std::vector<HoldOut> parts_of(const std::vector<Source>& sources,
                              const SamplerOptions& options, double share) {
  std::vector<int64_t> sizes;
  for (const Source& source : sources) {
    sizes.push_back(samples_in(source.size(), options.seq_len, source.name));
  }
  return hold_out(sizes, share);
}

// The samples held out are of one set: weights are for training.
Sampler sampler_of(const std::vector<Source>& sources,
                   const std::vector<HoldOut>& parts,
                   const SamplerOptions& options, Part part) {
  std::vector<int64_t> sizes;
  std::vector<double> weights;
  int64_t held = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    sizes.push_back(parts[i].num_kept());
    weights.push_back(sources[i].weight);
    held += parts[i].num_held();
  }
  if (part == Part::kHeldOut) return {{held}, {1.0}, options};
  return {sizes, weights, options};
}

std::vector<Source> one_source(TokenStream tokens, const std::string& name) {
  return {{name, std::make_shared<const TokenStream>(std::move(tokens))}};
}

}  // namespace

std::vector<HoldOut> hold_out(const std::vector<int64_t>& sizes, double share) {
  std::vector<HoldOut> parts;
  int64_t samples = 0, held = 0;
  for (const int64_t size : sizes) {
    const int64_t wanted = std::llround(share * static_cast<double>(size));
    parts.emplace_back(size, std::min(wanted, size - 1));
    samples += size;
    held += parts.back().num_held();
  }
  TS_CHECK_CONFIG(share == 0 || held > 0, "data.valid_share (", share, ") of ",
                  samples,
                  " samples is none. Give a larger share, or more data.");
  return parts;
}

Dataset::Dataset(TokenStream tokens, const SamplerOptions& options,
                 const std::string& name)
    : Dataset(one_source(std::move(tokens), name), options) {}

Dataset::Dataset(std::vector<Source> sources, const SamplerOptions& options,
                 const Held& held)
    : sources_(std::move(sources)),
      part_(held.part),
      parts_(parts_of(sources_, options, held.share)),
      sampler_(sampler_of(sources_, parts_, options, held.part)) {}

Batch Dataset::batch(int64_t step, int64_t first, int64_t count) const {
  return gather(sampler_.sample_indices(step, first, count));
}

void Dataset::will_need(int64_t step, int64_t first, int64_t count) const {
  for (const int64_t sample : sampler_.sample_indices(step, first, count)) {
    const Mixture::Place place = place_of(sample);
    sources_[place.source].tokens->will_need(sampler_.first_token(place.index),
                                             sampler_.options().seq_len + 1);
  }
}

Batch Dataset::in_order(int64_t first, int64_t count) const {
  const int64_t size = sampler_.num_samples();
  TORCH_INTERNAL_ASSERT(first >= 0 && count >= 0 && first + count <= size,
                        "samples ", first, " + ", count, " of ", size);
  std::vector<int64_t> samples(count);
  std::iota(samples.begin(), samples.end(), first);
  if (part_ == Part::kHeldOut) {
    const Permutation order(size, /*seed=*/0, /*epoch=*/0);
    for (int64_t& sample : samples) {
      sample = static_cast<int64_t>(order(sample));
    }
  }
  return gather(samples);
}

int64_t Dataset::num_targets(int64_t step, int64_t depth) const {
  const SamplerOptions& options = sampler_.options();
  const bool all_count = std::ranges::all_of(sources_, [&](const Source& one) {
    return one.tokens->all_count() &&
           (depth == 0 || !one.tokens->documents_apart());
  });
  if (all_count) {
    return options.global_batch * std::max<int64_t>(0, options.seq_len - depth);
  }
  int64_t count = 0;
  for (const int64_t sample : sampler_.sample_indices(step)) {
    count += num_targets_of(sample, depth);
  }
  return count;
}

// Without its tokens, which may be far away: any stand for them.
int64_t Dataset::num_targets_of(int64_t sample, int64_t depth) const {
  const Mixture::Place place = place_of(sample);
  const TokenStream& from = *sources_[place.source].tokens;
  const int64_t first = sampler_.first_token(place.index);
  const auto length = static_cast<size_t>(sampler_.options().seq_len);
  const auto values_of = [length](const at::Tensor& of) {
    return std::span(of.mutable_data_ptr<int64_t>(), length);
  };
  const auto row = [&] {
    return at::zeros({1, sampler_.options().seq_len}, at::kLong);
  };
  Batch batch{{}, row()};
  from.hide_uncounted(first + 1, values_of(batch.targets));
  at::Tensor targets = batch.targets;
  if (depth > 0) {
    if (from.documents_apart()) {
      batch.document_starts = row();
      from.document_starts(first, values_of(batch.document_starts));
    }
    targets = targets_ahead(batch, depth)[depth - 1];
  }
  const std::span<int64_t> values = values_of(targets);
  return std::ssize(values) - std::ranges::count(values, kIgnoreIndex);
}

Mixture::Place Dataset::place_of(int64_t sample) const {
  Mixture::Place place;
  if (part_ == Part::kHeldOut) {
    place.index = sample;
    while (place.index >= parts_[place.source].num_held()) {
      place.index -= parts_[place.source++].num_held();
    }
    place.index = parts_[place.source].held(place.index);
  } else {
    place = sampler_.place_of(sample);
    place.index = parts_[place.source].kept(place.index);
  }
  return place;
}

void Dataset::read(int64_t sample, const Batch& batch, int64_t row) const {
  const Mixture::Place place = place_of(sample);
  const TokenStream& from = *sources_[place.source].tokens;
  const int64_t first = sampler_.first_token(place.index);
  const auto length = static_cast<size_t>(sampler_.options().seq_len);
  const auto row_of = [&](const at::Tensor& of) {
    return std::span(of[row].mutable_data_ptr<int64_t>(), length);
  };
  std::vector<int64_t> tokens(length + 1);
  from.read(first, tokens);
  std::copy(tokens.begin(), tokens.end() - 1, row_of(batch.inputs).begin());
  from.hide_uncounted(first + 1, std::span(tokens).subspan(1));
  std::copy(tokens.begin() + 1, tokens.end(), row_of(batch.targets).begin());
  if (!batch.document_starts.defined()) return;
  from.document_starts(first, row_of(batch.document_starts));
}

Batch Dataset::gather(const std::vector<int64_t>& samples) const {
  const auto rows = static_cast<int64_t>(samples.size());
  const auto make = [&] {
    return at::empty({rows, sampler_.options().seq_len}, at::kLong);
  };
  const bool apart = std::ranges::any_of(sources_, [](const Source& one) {
    return one.tokens->documents_apart();
  });
  Batch batch{make(), make(), apart ? make() : at::Tensor()};
  for (int64_t row = 0; row < rows; ++row) read(samples[row], batch, row);
  return batch;
}

}  // namespace tessera::data
