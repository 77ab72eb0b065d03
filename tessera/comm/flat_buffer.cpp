#include "tessera/comm/flat_buffer.h"

#include <ATen/ATen.h>

#include <utility>

namespace tessera::comm {

FlatBuffer::FlatBuffer(std::vector<std::vector<int64_t>> shapes,
                       const at::TensorOptions& options, int64_t extra,
                       Group* group)
    : shapes_(std::move(shapes)), extra_(extra) {
  int64_t length = 0;
  for (const auto& shape : shapes_) {
    offsets_.push_back(length);
    const int64_t numel = c10::multiply_integers(shape);
    length += (numel + kAlignment - 1) / kAlignment * kAlignment;
  }
  const auto plain = options.requires_grad(false);
  flat_ = group == nullptr ? at::zeros({length + extra_}, plain)
                           : zeros(*group, {length + extra_}, plain);
}

at::Tensor FlatBuffer::view(size_t item) const {
  const auto& shape = shapes_.at(item);
  // variable_data: an alias that autograd does not know as a view.
  return flat_.narrow(0, offsets_[item], c10::multiply_integers(shape))
      .view(shape)
      .variable_data();
}

at::Tensor FlatBuffer::extra() const {
  return flat_.narrow(0, flat_.numel() - extra_, extra_);
}

}  // namespace tessera::comm
