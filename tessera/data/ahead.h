// Tokens further ahead than the next one: what multi-token prediction reads and
// is measured by.
//
// Shapes: see Batch. Of a batch that holds whole samples, before ranks take
//         parts of a sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/data/dataset.h"

namespace tessera::data {

// (D, B, T): at k - 1 the token k behind each of the inputs; 0 behind the end
// of a sample, where no target counts.
at::Tensor inputs_ahead(const Batch& batch, int64_t depths);

// (D, B, T): at k - 1 the target k behind that of each token; kIgnoreIndex
// behind a sample's end, and where the document is another one.
at::Tensor targets_ahead(const Batch& batch, int64_t depths);

}  // namespace tessera::data
