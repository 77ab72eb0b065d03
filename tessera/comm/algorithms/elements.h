// Elements in memory, shared out in pieces, and the steps of reducing them.
//
// Precision: fp16 and bf16 travel and are summed as fp32 until a result is
//         known, which is rounded once: as shm does it, at twice the bytes of
//         these dtypes on the way to a sum and the plain bytes from there on.
//         All other dtypes are summed as they are. A mean is the sum, divided
//         once, before it is rounded.
// Order:  the one of two partial results that holds the lower ranks comes
//         first, so that all ranks that compute a sum get the same bits.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/comm/algorithms/transport.h"
#include "tessera/comm/group.h"

namespace tessera::comm::algorithms {

struct Elements {
  std::byte* data = nullptr;
  int64_t numel = 0;
  at::ScalarType dtype = at::kByte;

  int64_t nbytes() const;
  std::span<std::byte> bytes() const;
  Elements part(int64_t begin, int64_t end) const;
};

// Elements of no tensor, not initialised. Never freed where an exception ends
// its scope: a message that was under way may still read it, or write to it.
class Scratch {
 public:
  Scratch(int64_t numel, at::ScalarType dtype);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Elements elements() const { return {data_.get(), numel_, dtype_}; }

 private:
  std::unique_ptr<std::byte[]> data_;
  int64_t numel_;
  at::ScalarType dtype_;
  int exceptions_;
};

// Where pieces 0 .. n - 1 begin, and the last one's end: n + 1 places.
using Bounds = std::vector<int64_t>;
// As even as can be: the first ones may have one element more.
Bounds even_bounds(int64_t numel, int64_t pieces);
// Pieces [first, last) of `whole`.
Elements pieces_of(const Elements& whole, const Bounds& bounds, int64_t first,
                   int64_t last);

// Nothing happens where both are one place.
void copy(const Elements& from, const Elements& to);

// A reduction over `ranks` ranks.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  int64_t ranks = 1;
};

// lower = lower op higher, or higher = lower op higher; tells the transport.
void reduce_into_lower(Transport& transport, const Elements& lower,
                       const Elements& higher, ReduceOp op);
void reduce_into_higher(Transport& transport, const Elements& lower,
                        const Elements& higher, ReduceOp op);

// The elements as partial sums of one rank: copied, or widened to fp32.
void begin_partial(const Elements& values, const Elements& partial);
// The result from partial sums of all ranks: divided for a mean, rounded.
// `result` may be `partial`.
void finish(const Elements& partial, const Elements& result,
            const Reduction& reduction);

// Partial sums that begin as `values`: in their own memory where that can be.
class Partial {
 public:
  explicit Partial(const Elements& values);
  const Elements& elements() const { return elements_; }

 private:
  std::unique_ptr<Scratch> scratch_;
  Elements elements_;
};

}  // namespace tessera::comm::algorithms
