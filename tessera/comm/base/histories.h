// Whether the ranks of a group call the same collectives in the same order, for
// backends that do not compare each one: a swapped pair, or a sum beside a
// maximum, gives numbers there that are wrong, and no error.
//
// Each rank keeps a hash of all that it has called. At every 128th collective
// they are compared, while the rank goes on; what was found is looked at before
// later ones are called.
//
// Comm:    an all_reduce(max) of 16 bytes over `backend` after every 128th
//          collective. No caller waits for it but where compare_next() asks for
//          it; as a collective of the group it has the group's time-out, and
//          those behind it come after it: a rank may be ahead of the others by
//          that much. What is called after the last 128th is compared where
//          compare_next() asks for it.
// Errors:  RanksDiffer.
// Threads: that which calls the group's collectives.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <deque>

#include "tessera/comm/base/flight_recorder.h"

namespace tessera::comm {

// The ranks of a group have called other collectives, or in another order.
class RanksDiffer : public c10::DistError {
  using DistError::DistError;
};

class Histories {
 public:
  // `backend` carries int64 tensors of the CPU.
  explicit Histories(c10::intrusive_ptr<c10d::Backend> backend);
  // Throws where a comparison that has ended found a difference.
  void check();
  // The next collective, once the backend has taken it.
  void add(const Operation& operation);
  // The next add() compares, and the check() behind it waits for that.
  void compare_next() { compares_next_ = true; }

 private:
  struct Comparison {
    uint64_t collectives = 0;  // that it covers
    at::Tensor largest;        // of the ranks' {hash, ~hash}
    c10::intrusive_ptr<c10d::Work> work;
  };

  void compare();
  void wait();

  const c10::intrusive_ptr<c10d::Backend> backend_;
  uint64_t hash_ = 0;
  uint64_t collectives_ = 0;
  bool compares_next_ = false, waits_ = false;
  std::deque<Comparison> under_way_;  // oldest first
};

}  // namespace tessera::comm
