// Means of gradients over data-parallel ranks, while backward still runs.
//
// Buckets: of comm::FlatGradients, filled in the order in which gradients
//          become ready: at first the reverse of declaration, after the first
//          reduction the order that rank 0 saw.
// Comm:    one all_reduce(sum) a bucket on `group`, begun as soon as the bucket
//          and all before it are full. Beside the gradients it moves two
//          elements a bucket: how many ranks took part, by which the sum is
//          divided, and how many gradients were missing.
// Order:   bucket sizes, overlap and the order of buckets change no bit where
//          the group's sums are in rank order (shm).
// Hang:    a gradient that never arrives holds nobody up: finish() sends zeros
//          in its place, and every rank learns of it.
// Threads: hooks run in the thread that runs backward.
// Source:  PyTorch Distributed, Li et al. 2020, arXiv 2006.15704, section 3.2.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/flat_gradients.h"
#include "tessera/comm/group.h"
#include "tessera/wrappers/detail/gradient_hooks.h"
#include "tessera/wrappers/detail/same_parameters.h"

namespace tessera::wrappers {

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
  GradientReducer(const std::vector<NamedParameter>& parameters,
                  comm::Group& group, const ReducerOptions& options);
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Call order of a step: zero() (backward)* arm() backward finish().
  void zero();
  // The next backward is the step's last on this rank: reduce as it goes.
  void arm();
  // Waits until every bucket is summed. With `active` false (a rank without
  // data, which calls arm() and finish() alone) it adds zeros.
  ReducedStep finish(bool active = true);

 private:
  struct Bucket {
    std::vector<size_t> items;  // indices of parameters
    comm::FlatGradients gradients;
    size_t pending = 0;  // gradients still to come
  };
  struct Place {
    size_t bucket, item;
  };

  void lay_out(const std::vector<size_t>& order);
  void on_ready(size_t item);
  void check_in_place(size_t item) const;
  void issue_full_buckets();
  void issue(bool active);
  void adopt_order_of_rank_0();

  std::vector<std::string> names_;      // by parameter
  std::vector<at::Tensor> parameters_;  // those that require a gradient
  comm::Group& group_;
  const ReducerOptions options_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;         // by parameter
  std::vector<bool> touched_;         // by parameter: since zero()
  std::vector<bool> ready_;           // by parameter: since arm()
  std::vector<int64_t> ready_order_;  // as the gradients came
  bool order_is_known_ = false;
  bool armed_ = false;
  size_t next_bucket_ = 0;  // buckets are issued in order, alike on every rank
  GradientHooks hooks_;     // gone before what they touch
};

}  // namespace tessera::wrappers
