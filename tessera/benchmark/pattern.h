// Values by which an exchange is told from a wrong one.
//
// Element i of rank r in round k is a small whole number of hash(i), r and k:
// another place, another rank, an older round and memory that nobody wrote all
// show. Numbers are so small that every sum and product of them is exact in
// every dtype, of any number of ranks.
//   moved:   1 + (h(i) + 3 r + k) mod 127
//   reduced: 1 + (h(i) + 3 r + k) mod (127 / ranks); beyond 63 ranks 0, or 1 of
//            at most 127 of them; of a product 1, or 2 of at most 6
// with 0 <= h(i) < 127. Means may round: they are compared within two ulps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::benchmark {

class Pattern {
 public:
  // For tensors of up to `numel` elements.
  Pattern(int64_t numel, int64_t ranks);

  // Which numbers: those of a reduction, or of data that is only moved.
  using Redop = std::optional<comm::ReduceOp>;

  // What `rank` holds in `round`: elements `first` and on.
  void write(at::Tensor tensor, int64_t rank, int64_t round, Redop redop,
             int64_t first = 0) const;
  // Elements of `tensor` that are not what `rank` holds.
  int64_t count_not_of(const at::Tensor& tensor, int64_t rank, int64_t round,
                       int64_t first = 0) const;
  // Elements of `tensor` that are not the reduction over all ranks.
  int64_t count_not_reduced(const at::Tensor& tensor, int64_t round,
                            comm::ReduceOp redop, int64_t first = 0) const;

 private:
  double value(int64_t hash, int64_t rank, int64_t round, Redop redop) const;
  double reduced(int64_t hash, int64_t round, comm::ReduceOp redop) const;
  const uint8_t* hashes(int64_t first, int64_t numel) const;

  int64_t ranks_;
  std::vector<uint8_t> hash_;  // h(i)
};

}  // namespace tessera::benchmark
