// Means of gradients over data-parallel ranks, while backward still runs:
// whoever calls it. A hook on every parameter hears of the backward's first
// gradient, and reduces; what is left over is reduced as the backward ends.
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
// Hang:    a gradient that never arrives holds nobody up: zeros go in its
//          place, and every rank learns of it.
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
#include "tessera/wrappers/distributed_data_parallel.h"

namespace tessera::wrappers {

class GradientReducer {
 public:
  // Takes over .grad of every parameter that requires one.
  GradientReducer(const std::vector<NamedParameter>& parameters,
                  comm::Group& group,
                  const DistributedDataParallelOptions& options);
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Before a forward: refuses a model whose gradients were not reduced.
  void prepare();
  // A backward without communication. After a reduction it begins with zeros.
  void accumulate(const at::Tensor& loss);
  // The same, reduced: also where the loss reaches no parameter on this rank.
  void backward(const at::Tensor& loss);
  // Takes part in the others' backward with zeros; how many ranks had data.
  int64_t stand_by();

  int64_t num_reductions() const { return num_reductions_; }
  // Whether some rank had no data in the last reduction: alike on all ranks.
  bool some_have_joined() const { return active_ranks_ < group_.size(); }

 private:
  struct Bucket {
    std::vector<size_t> items;  // indices of parameters
    comm::FlatGradients gradients;
    size_t pending = 0;  // gradients still to come
  };
  struct Place {
    size_t bucket, item;
  };
  // What a reduction found out about all ranks.
  struct Found {
    int64_t active_ranks = 0;       // that had data
    int64_t missing_gradients = 0;  // over all ranks
    std::vector<std::string> missing_here;
  };

  void lay_out(const std::vector<size_t>& order);
  void zero();
  void arm();
  void on_gradient(size_t item);
  void adopt(size_t item);
  void issue_full_buckets();
  void issue(bool active);
  Found finish(bool active);
  void finish_backward();
  void adopt_order_of_rank_0();

  std::vector<std::string> names_;      // by parameter
  std::vector<at::Tensor> parameters_;  // those that require a gradient
  comm::Group& group_;
  const DistributedDataParallelOptions options_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;         // by parameter
  std::vector<bool> touched_;         // by parameter: since the last reduction
  std::vector<bool> ready_;           // by parameter: since arm()
  std::vector<int64_t> ready_order_;  // as the gradients came
  bool order_is_known_ = false;
  bool accumulates_ = false;  // the backward that runs is not to be reduced
  bool armed_ = false;        // the backward that runs is
  size_t next_bucket_ = 0;   // buckets are issued in order, alike on every rank
  bool holds_means_ = true;  // nothing was added since the last reduction
  int64_t num_reductions_ = 0;
  int64_t active_ranks_;  // in the last reduction; before it, all
  GradientHooks hooks_;   // gone before what they touch
};

}  // namespace tessera::wrappers
