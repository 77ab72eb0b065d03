#include "tessera/comm/mpi/reducible.h"

#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

namespace tessera::comm::mpi {
namespace {

bool is_half(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

template <typename T>
void widen(const at::Tensor& from, const at::Tensor& to) {
  const T* in = static_cast<const T*>(from.const_data_ptr());
  auto* out = static_cast<float*>(to.data_ptr());
  std::transform(in, in + from.numel(), out,
                 [](T value) { return static_cast<float>(value); });
}

template <typename T>
void narrow(const at::Tensor& from, const at::Tensor& to) {
  const auto* in = static_cast<const float*>(from.const_data_ptr());
  std::transform(in, in + from.numel(), static_cast<T*>(to.data_ptr()),
                 [](float value) { return static_cast<T>(value); });
}

template <typename T>
void divide(const at::Tensor& tensor, int64_t divisor) {
  T* data = static_cast<T*>(tensor.data_ptr());
  const T by = static_cast<T>(divisor);
  std::for_each(data, data + tensor.numel(), [by](T& value) { value /= by; });
}

}  // namespace

Reducible::Reducible(const at::Tensor& tensor, bool apart)
    : tensor_(tensor), buffer_(tensor) {
  if (is_half(tensor.scalar_type())) {
    buffer_ = at::empty(tensor.sizes(), tensor.options().dtype(at::kFloat));
  } else if (apart) {
    buffer_ = at::empty(tensor.sizes(), tensor.options());
  }
}

void Reducible::read() const {
  if (buffer_.is_same(tensor_)) return;
  if (tensor_.scalar_type() == at::kHalf)
    return widen<c10::Half>(tensor_, buffer_);
  if (tensor_.scalar_type() == at::kBFloat16) {
    return widen<c10::BFloat16>(tensor_, buffer_);
  }
  std::memcpy(buffer_.data_ptr(), tensor_.const_data_ptr(), tensor_.nbytes());
}

void Reducible::write(ReduceOp op, int64_t ranks) const {
  if (op == ReduceOp::kMean) {
    dtype() == at::kDouble ? divide<double>(buffer_, ranks)
                           : divide<float>(buffer_, ranks);
  }
  if (buffer_.is_same(tensor_)) return;
  if (tensor_.scalar_type() == at::kHalf)
    return narrow<c10::Half>(buffer_, tensor_);
  if (tensor_.scalar_type() == at::kBFloat16) {
    return narrow<c10::BFloat16>(buffer_, tensor_);
  }
  std::memcpy(tensor_.data_ptr(), buffer_.const_data_ptr(), tensor_.nbytes());
}

}  // namespace tessera::comm::mpi
