#include "tessera/comm/algorithms/elements.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

#include "tessera/comm/base/keep_for_ever.h"
#include "tessera/comm/base/partial_sums.h"
#include "tessera/comm/base/reduce.h"

namespace tessera::comm::algorithms {
namespace {

// A mean is a sum on its way.
ReduceOp on_the_way(ReduceOp op) {
  return op == ReduceOp::kMean ? ReduceOp::kSum : op;
}

void reduce_two(Transport& transport, const Elements& lower,
                const Elements& higher, const Elements& into, ReduceOp op) {
  if (into.numel == 0) return;
  const std::array<const void*, 2> inputs = {lower.data, higher.data};
  reduce(inputs, into.data, into.numel, into.dtype, on_the_way(op));
  transport.reduced(into.nbytes());
}

}  // namespace

int64_t Elements::nbytes() const {
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

std::span<std::byte> Elements::bytes() const {
  return {data, static_cast<size_t>(nbytes())};
}

Elements Elements::part(int64_t begin, int64_t end) const {
  const auto width = static_cast<int64_t>(c10::elementSize(dtype));
  return {data + begin * width, end - begin, dtype};
}

Scratch::Scratch(int64_t numel, at::ScalarType dtype)
    : data_(new std::byte[numel * c10::elementSize(dtype)]),
      numel_(numel),
      dtype_(dtype),
      exceptions_(std::uncaught_exceptions()) {}

Scratch::~Scratch() {
  if (std::uncaught_exceptions() > exceptions_) keep_for_ever(data_.release());
}

Bounds even_bounds(int64_t numel, int64_t pieces) {
  Bounds bounds;
  for (int64_t i = 0; i <= pieces; ++i) {
    bounds.push_back(i * (numel / pieces) + std::min(i, numel % pieces));
  }
  return bounds;
}

Elements pieces_of(const Elements& whole, const Bounds& bounds, int64_t first,
                   int64_t last) {
  return whole.part(bounds[first], bounds[last]);
}

void copy(const Elements& from, const Elements& to) {
  if (from.data == to.data || from.numel == 0) return;
  std::memcpy(to.data, from.data, from.bytes().size());
}

void reduce_into_lower(Transport& transport, const Elements& lower,
                       const Elements& higher, ReduceOp op) {
  reduce_two(transport, lower, higher, lower, op);
}

void reduce_into_higher(Transport& transport, const Elements& lower,
                        const Elements& higher, ReduceOp op) {
  reduce_two(transport, lower, higher, higher, op);
}

void begin_partial(const Elements& values, const Elements& partial) {
  comm::begin_partial(values.data, partial.data, values.numel, values.dtype);
}

void finish(const Elements& partial, const Elements& result,
            const Reduction& reduction) {
  finish_partial(partial.data, result.data, result.numel, result.dtype,
                 reduction.op, reduction.ranks);
}

Partial::Partial(const Elements& values) : elements_(values) {
  const at::ScalarType dtype = partial_dtype(values.dtype);
  if (dtype == values.dtype) return;
  scratch_ = std::make_unique<Scratch>(values.numel, dtype);
  elements_ = scratch_->elements();
  begin_partial(values, elements_);
}

}  // namespace tessera::comm::algorithms
