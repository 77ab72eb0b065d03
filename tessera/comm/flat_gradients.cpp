#include "tessera/comm/flat_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "tessera/core/memory_kind.h"

namespace tessera::comm {
namespace {

FlatBuffer buffer_of(const std::vector<at::Tensor>& parameters,
                     at::ScalarType dtype, int64_t extra, Group* group) {
  const MemoryScope scope(MemoryKind::kGradients);
  std::vector<std::vector<int64_t>> shapes;
  for (const at::Tensor& parameter : parameters) {
    shapes.push_back(parameter.sizes().vec());
  }
  return {std::move(shapes), parameters.at(0).options().dtype(dtype), extra,
          group};
}

}  // namespace

FlatGradients::FlatGradients(std::vector<at::Tensor> parameters,
                             at::ScalarType dtype, int64_t extra, Group* group)
    : parameters_(std::move(parameters)),
      buffer_(buffer_of(parameters_, dtype, extra, group)) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].grad().defined()) adopt(i);
  }
  attach();
}

bool FlatGradients::is_in_place(size_t i) const {
  const at::Tensor& gradient = parameters_[i].grad();
  return gradient.defined() && gradient.has_storage() &&
         gradient.storage().is_alias_of(flat().storage());
}

// The tensor behind .grad stays the same object, so that an optimizer may hold
// on to it.
void FlatGradients::adopt(size_t i) {
  if (is_in_place(i)) return;
  const at::NoGradGuard no_grad;
  at::Tensor& gradient = parameters_[i].mutable_grad();
  const at::Tensor own = view(i);
  if (gradient.defined()) {
    own.copy_(gradient);
    gradient.set_data(own);
  } else {
    gradient = own.zero_();
  }
}

void FlatGradients::attach() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_in_place(i)) parameters_[i].mutable_grad() = view(i);
  }
}

void FlatGradients::zero() {
  const at::NoGradGuard no_grad;
  flat().zero_();
  attach();
}

void FlatGradients::begin_all_reduce(Group& group, Mode mode,
                                     int64_t bucket_bytes) {
  const int64_t all = flat().numel();
  const int64_t most = elements_of_bucket(
      bucket_bytes, all, static_cast<int64_t>(flat().itemsize()));
  for (int64_t begin = 0; begin < all; begin += most) {
    works_.push_back(
        group.all_reduce(flat().narrow(0, begin, std::min(most, all - begin)),
                         ReduceOp::kSum, mode));
  }
}

void FlatGradients::await_all_reduce() {
  for (auto& work : std::exchange(works_, {})) work.wait();
}

int64_t elements_of_bucket(int64_t bytes, int64_t all, int64_t item) {
  return bytes == 0 ? all : std::max<int64_t>(1, bytes / item);
}

std::vector<std::vector<size_t>> cut_into_buckets(
    const std::vector<at::Tensor>& parameters, const std::vector<size_t>& order,
    const TypeOfGradient& type_of, int64_t bytes) {
  std::vector<std::vector<size_t>> buckets;
  int64_t room = 0;
  for (const size_t item : order) {
    const at::Tensor& parameter = parameters[item];
    const at::ScalarType type = type_of(parameter);
    const int64_t size =
        parameter.numel() * static_cast<int64_t>(c10::elementSize(type));
    if (buckets.empty() || size > room ||
        type != type_of(parameters[buckets.back()[0]])) {
      buckets.emplace_back();
      room = bytes;
    }
    buckets.back().push_back(item);
    room -= size;
  }
  return buckets;
}

}  // namespace tessera::comm
