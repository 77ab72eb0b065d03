#include "tessera/data/ahead.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/core/ignore_index.h"

namespace tessera::data {
namespace {

// (D, B, T): x of k tokens on; `filler` behind the end.
at::Tensor moved(const at::Tensor& x, int64_t depths, int64_t filler) {
  const int64_t length = x.size(1);
  const at::Tensor all =
      at::full({depths, x.size(0), length}, filler, x.options());
  for (int64_t depth = 1; depth <= depths; ++depth) {
    const int64_t kept = std::max<int64_t>(0, length - depth);
    all[depth - 1].narrow(1, 0, kept).copy_(x.narrow(1, length - kept, kept));
  }
  return all;
}

}  // namespace

at::Tensor inputs_ahead(const Batch& batch, int64_t depths) {
  return moved(batch.inputs, depths, /*filler=*/0);
}

at::Tensor targets_ahead(const Batch& batch, int64_t depths) {
  const at::Tensor targets = moved(batch.targets, depths, kIgnoreIndex);
  if (!batch.document_starts.defined()) return targets;
  const at::Tensor starts =
      moved(batch.document_starts, depths, /*filler=*/kIgnoreIndex);
  return targets.masked_fill_(starts != batch.document_starts, kIgnoreIndex);
}

}  // namespace tessera::data
