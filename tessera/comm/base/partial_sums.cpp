#include "tessera/comm/base/partial_sums.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

namespace tessera::comm {
namespace {

template <typename From, typename To>
void convert(const void* from, void* to, int64_t numel) {
  const From* in = static_cast<const From*>(from);
  std::transform(in, in + numel, static_cast<To*>(to),
                 [](From value) { return static_cast<To>(value); });
}

template <typename T>
void divide(void* sums, int64_t numel, int64_t ranks) {
  T* values = static_cast<T*>(sums);
  const T by = static_cast<T>(ranks);
  std::for_each(values, values + numel, [by](T& value) { value /= by; });
}

void copy_unless_same(const void* from, void* to, int64_t numel,
                      at::ScalarType dtype) {
  if (from == to || numel == 0) return;
  std::memcpy(to, from, static_cast<size_t>(numel) * c10::elementSize(dtype));
}

}  // namespace

at::ScalarType partial_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

void begin_partial(const void* values, void* partial, int64_t numel,
                   at::ScalarType dtype) {
  if (dtype == at::kHalf)
    return convert<c10::Half, float>(values, partial, numel);
  if (dtype == at::kBFloat16) {
    return convert<c10::BFloat16, float>(values, partial, numel);
  }
  copy_unless_same(values, partial, numel, dtype);
}

void finish_partial(void* partial, void* result, int64_t numel,
                    at::ScalarType dtype, ReduceOp op, int64_t ranks) {
  if (op == ReduceOp::kMean) {
    dtype == at::kDouble ? divide<double>(partial, numel, ranks)
                         : divide<float>(partial, numel, ranks);
  }
  if (dtype == at::kHalf)
    return convert<float, c10::Half>(partial, result, numel);
  if (dtype == at::kBFloat16) {
    return convert<float, c10::BFloat16>(partial, result, numel);
  }
  copy_unless_same(partial, result, numel, dtype);
}

}  // namespace tessera::comm
