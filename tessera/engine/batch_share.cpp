#include "tessera/engine/batch_share.h"

#include <ATen/Functions.h>

#include <utility>

namespace tessera::engine {
namespace {

constexpr int64_t kReader = 0;  // of a group
// In front: whether documents are told apart, and targets that count, by depth.
int64_t head_of(const BatchExtent& extent) { return 2 + extent.depths; }

int64_t num_parts(const BatchExtent& extent) {
  return extent.documents ? 3 : 2;
}

// (parts, M, B, T).
at::Tensor body(const at::Tensor& tensor, const BatchExtent& extent) {
  const int64_t head = head_of(extent);
  return tensor.narrow(0, head, tensor.numel() - head)
      .view({num_parts(extent), extent.microbatches, extent.samples,
             extent.tokens});
}

void fill(const at::Tensor& tensor, const BatchExtent& extent,
          const Reading& reading) {
  auto* const head = tensor.mutable_data_ptr<int64_t>();
  head[0] = 0;
  for (int64_t depth = 0; depth <= extent.depths; ++depth) {
    head[1 + depth] = reading.num_targets ? reading.num_targets(depth) : 0;
  }
  const at::Tensor parts = body(tensor, extent);
  for (int64_t m = 0; m < extent.microbatches; ++m) {
    const data::Batch batch = reading.microbatch(m);
    parts[0][m].copy_(batch.inputs);
    parts[1][m].copy_(batch.targets);
    if (!batch.document_starts.defined()) continue;
    TORCH_INTERNAL_ASSERT(extent.documents, "documents that nobody awaits");
    parts[2][m].copy_(batch.document_starts);
    head[0] = 1;
  }
}

}  // namespace

int64_t BatchExtent::elements() const {
  return head_of(*this) + num_parts(*this) * microbatches * samples * tokens;
}

BatchExtent extent_of_step(const RunConfig& config, int64_t samples) {
  return {.microbatches = accumulation(config),
          .samples = samples,
          .tokens = config.data.seq_len,
          .documents = config.data.documents_apart(),
          .depths = config.model.mtp.layers};
}

void BatchShare::begin(int64_t key, const BatchExtent& extent,
                       const Reading& reading, comm::Mode mode) {
  coming_ = Moved{key, extent, at::empty({extent.elements()}, at::kLong)};
  if (group_.rank() == kReader) fill(coming_->tensor, extent, reading);
  work_ = group_.broadcast(coming_->tensor, kReader, mode);
}

void BatchShare::await() { std::exchange(work_, {}).synchronize(); }

std::optional<int64_t> BatchShare::coming() const {
  return coming_ ? std::optional(coming_->key) : std::nullopt;
}

void BatchShare::turn() { held_ = std::exchange(coming_, std::nullopt); }

data::Batch BatchShare::microbatch(int64_t microbatch) const {
  const at::Tensor parts = body(held_->tensor, held_->extent);
  data::Batch batch{parts[0][microbatch], parts[1][microbatch]};
  if (held_->tensor.const_data_ptr<int64_t>()[0] == 1) {
    batch.document_starts = parts[2][microbatch];
  }
  return batch;
}

std::vector<int64_t> BatchShare::num_targets() const {
  const auto* counts = held_->tensor.const_data_ptr<int64_t>() + 1;
  return {counts, counts + 1 + held_->extent.depths};
}

}  // namespace tessera::engine
