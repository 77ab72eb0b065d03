#include "tessera/verify/random_batch.h"

#include <ATen/ATen.h>

#include <string>

#include "tessera/core/random.h"

namespace tessera::verify {
namespace {

constexpr uint64_t kDocumentLength = 6;  // in the mean

// In each sample, one behind the other.
at::Tensor random_documents(const random::Stream& stream, int64_t first,
                            int64_t count, int64_t length) {
  const at::Tensor starts = at::empty({count, length}, at::kLong);
  const auto begin = static_cast<uint64_t>(first * length);
  auto* start = starts.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < starts.numel(); ++i) {
    const int64_t place = i % length;
    const bool begins =
        place == 0 ||
        stream.below(begin + static_cast<uint64_t>(i), kDocumentLength) == 0;
    start[i] = begins ? place : start[i - 1];
  }
  return starts;
}

}  // namespace

data::Batch random_batch(const engine::RunConfig& config, int64_t step,
                         int64_t first, int64_t count) {
  const random::Stream stream(static_cast<uint64_t>(config.run.seed),
                              "verify/" + std::to_string(step));
  const int64_t length = config.data.seq_len + 1;
  const at::Tensor ids = at::empty({count, length}, at::kLong);
  auto* id = ids.mutable_data_ptr<int64_t>();
  const auto begin = static_cast<uint64_t>(first * length);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    id[i] = static_cast<int64_t>(
        stream.below(begin + static_cast<uint64_t>(i),
                     static_cast<uint64_t>(config.model.vocab)));
  }
  data::Batch batch{ids.narrow(1, 0, length - 1), ids.narrow(1, 1, length - 1)};
  if (config.data.documents_apart()) {
    const random::Stream borders(static_cast<uint64_t>(config.run.seed),
                                 "verify documents/" + std::to_string(step));
    batch.document_starts = random_documents(borders, first, count, length - 1);
  }
  return batch;
}

}  // namespace tessera::verify
