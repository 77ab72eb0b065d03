// Means of gradients over data-parallel ranks, while backward still runs.
//
// Buckets: gradients live in flat buckets (parameter.grad() is a view into
//          one), filled in the order in which gradients become ready: at first
//          the reverse of declaration, after the first reduction the order that
//          rank 0 saw.
// Comm:    one all_reduce(sum) a bucket on `group`, issued as soon as the
//          bucket and all before it are full. Ring traffic a step and rank:
//          2 (N-1)/N times the bytes of the gradients, and two elements a
//          bucket: how many ranks took part, by which the sum is divided, and
//          how many gradients were missing.
// Order:   bucket sizes, overlap and the order of buckets change no bit where
//          the group's sums are in rank order (shm).
// Hang:    a gradient that never arrives holds nobody up: finish() sends zeros
//          in its place, and every rank learns of it.
// Threads: hooks run in the thread that runs backward.
// Source:  PyTorch Distributed, Li et al. 2020, arXiv 2006.15704, section 3.2.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::wrappers {

struct NamedParameter {
  std::string name;
  at::Tensor parameter;
};

struct ReducerOptions {
  int64_t bucket_bytes;  // at least one parameter a bucket
  bool overlap;          // false: everything is reduced in finish()
};

// What a reduction found out about all ranks.
struct ReducedStep {
  int64_t active_ranks = 0;       // that had data
  int64_t missing_gradients = 0;  // over all ranks
  std::vector<std::string> missing_here;
};

class GradientReducer {
 public:
  // Takes over .grad of every parameter that requires one.
  GradientReducer(std::vector<NamedParameter> parameters, comm::Group& group,
                  const ReducerOptions& options);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Call order of a step: zero() (backward)* arm() backward finish().
  void zero();
  // The next backward is the step's last on this rank: reduce as it goes.
  void arm();
  // Waits until every bucket is summed. With `active` false (a rank without
  // data, which calls arm() and finish() alone) it adds zeros.
  ReducedStep finish(bool active = true);

  size_t num_buckets() const;
  // Bytes that one reduction hands to all_reduce.
  int64_t bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::wrappers
