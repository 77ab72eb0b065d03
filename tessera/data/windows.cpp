#include "tessera/data/windows.h"

#include <ATen/Functions.h>
#include <ATen/ceil_div.h>

#include <algorithm>
#include <span>

#include "tessera/core/ignore_index.h"

namespace tessera::data {
namespace {

std::span<int64_t> span_of(const at::Tensor& ids) {
  return {ids.mutable_data_ptr<int64_t>(), static_cast<size_t>(ids.numel())};
}

}  // namespace

Windows::Windows(const TokenStream& tokens, int64_t seq_len, int64_t batch,
                 bool padded)
    : tokens_(tokens), seq_len_(seq_len), batch_(batch), padded_(padded) {}

int64_t Windows::count() const {
  return at::ceil_div(full(), batch_) + (rest() > 0 ? 1 : 0);
}

Batch Windows::read(int64_t index) const {
  const int64_t first = index * batch_;
  if (first >= full()) return read(full(), 1, rest());
  return read(first, std::min(batch_, full() - first), seq_len_);
}

Batch Windows::read(int64_t first, int64_t count, int64_t length) const {
  const at::Tensor ids = at::empty({count * length + 1}, at::kLong);
  tokens_.read(first * seq_len_, span_of(ids));
  const auto window = [&](int64_t shift) {
    return ids.narrow(0, shift, count * length).view({count, length});
  };
  Batch batch{window(0), window(1)};
  if (!tokens_.all_count()) {
    batch.targets = batch.targets.clone();
    tokens_.hide_uncounted(first * seq_len_ + 1, span_of(batch.targets));
  }
  if (tokens_.documents_apart()) {
    batch.document_starts = at::empty({count, length}, at::kLong);
    for (int64_t i = 0; i < count; ++i) {
      tokens_.document_starts((first + i) * seq_len_,
                              span_of(batch.document_starts[i]));
    }
  }
  if (!padded_ || length == seq_len_) return batch;
  const auto pad = [&](at::Tensor& tensor, int64_t with) {
    if (!tensor.defined()) return;
    tensor = at::constant_pad_nd(tensor, {0, seq_len_ - length}, with);
  };
  pad(batch.inputs, 0);
  pad(batch.targets, kIgnoreIndex);
  pad(batch.document_starts, length);  // what fills the row
  batch.unpadded = length;
  return batch;
}

}  // namespace tessera::data
