#include "tessera/comm/detail/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "tessera/comm/detail/verb.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Elements that are reduced at a time: two such blocks stay in the L1 cache.
constexpr int64_t kBlock = 1024;

// What a T is accumulated in.
template <typename T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<c10::Half> {
  using type = float;
};
template <>
struct AccumulatorOf<c10::BFloat16> {
  using type = float;
};

template <typename A, ReduceOp op>
A combine(A a, A b) {
  if constexpr (op == ReduceOp::kMin || op == ReduceOp::kMax) {
    if constexpr (std::is_floating_point_v<A>) {
      if (a != a) return a;
      if (b != b) return b;
    }
    return (op == ReduceOp::kMin) == (b < a) ? b : a;
  } else if constexpr (std::is_floating_point_v<A>) {
    return op == ReduceOp::kProduct ? a * b : a + b;
  } else {
    // Unsigned, so that integers wrap.
    using U = std::make_unsigned_t<A>;
    const uint64_t x = static_cast<U>(a);
    const uint64_t y = static_cast<U>(b);
    return static_cast<A>(op == ReduceOp::kProduct ? x * y : x + y);
  }
}

template <typename T, ReduceOp op>
void reduce_block(std::span<const void* const> inputs, T* output,
                  int64_t offset, int64_t count) {
  using A = typename AccumulatorOf<T>::type;
  A sum[kBlock];
  const T* first = static_cast<const T*>(inputs[0]) + offset;
  for (int64_t i = 0; i < count; ++i) sum[i] = static_cast<A>(first[i]);
  for (size_t p = 1; p < inputs.size(); ++p) {
    const T* next = static_cast<const T*>(inputs[p]) + offset;
    for (int64_t i = 0; i < count; ++i) {
      sum[i] = combine<A, op>(sum[i], static_cast<A>(next[i]));
    }
  }
  if constexpr (op == ReduceOp::kMean) {
    const A ranks = static_cast<A>(inputs.size());
    for (int64_t i = 0; i < count; ++i) sum[i] /= ranks;
  }
  for (int64_t i = 0; i < count; ++i) {
    output[offset + i] = static_cast<T>(sum[i]);
  }
}

template <typename T, ReduceOp op>
void reduce_as(std::span<const void* const> inputs, void* output,
               int64_t numel) {
  T* out = static_cast<T*>(output);
  int64_t offset = 0;
  // A constant count lets the compiler use vectors.
  for (; offset + kBlock <= numel; offset += kBlock) {
    reduce_block<T, op>(inputs, out, offset, kBlock);
  }
  if (offset < numel) reduce_block<T, op>(inputs, out, offset, numel - offset);
}

template <typename T>
void reduce_type(std::span<const void* const> inputs, void* output,
                 int64_t numel, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_as<T, ReduceOp::kSum>(inputs, output, numel);
    case ReduceOp::kMean:
      return reduce_as<T, ReduceOp::kMean>(inputs, output, numel);
    case ReduceOp::kMin:
      return reduce_as<T, ReduceOp::kMin>(inputs, output, numel);
    case ReduceOp::kMax:
      return reduce_as<T, ReduceOp::kMax>(inputs, output, numel);
    case ReduceOp::kProduct:
      return reduce_as<T, ReduceOp::kProduct>(inputs, output, numel);
  }
}

using Reducer = void (*)(std::span<const void* const>, void*, int64_t,
                         ReduceOp);

Reducer reducer_for(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return reduce_type<double>;
    case at::kFloat:
      return reduce_type<float>;
    case at::kHalf:
      return reduce_type<c10::Half>;
    case at::kBFloat16:
      return reduce_type<c10::BFloat16>;
    case at::kLong:
      return reduce_type<int64_t>;
    case at::kInt:
      return reduce_type<int32_t>;
    case at::kShort:
      return reduce_type<int16_t>;
    case at::kChar:
      return reduce_type<int8_t>;
    case at::kByte:
    case at::kBool:
      return reduce_type<uint8_t>;
    default:
      return nullptr;
  }
}

}  // namespace

void check_reducible(at::ScalarType dtype, ReduceOp op) {
  TS_CHECK(reducer_for(dtype) != nullptr, "cannot reduce ", dtype,
           " tensors. Reduce float, double, half, bfloat16, bool or integers.");
  TS_CHECK(op != ReduceOp::kMean || at::isFloatingType(dtype), "the mean of ",
           dtype, " tensors is not defined. Use the sum.");
  TS_CHECK(dtype != at::kBool || op == ReduceOp::kMin || op == ReduceOp::kMax,
           "the ", name_of(op),
           " of bool tensors is not defined. Use min (and) or max (or).");
}

void reduce(std::span<const void* const> inputs, void* output, int64_t numel,
            at::ScalarType dtype, ReduceOp op) {
  reducer_for(dtype)(inputs, output, numel, op);
}

}  // namespace tessera::comm
