// Where the gradients of a bundle lie on this rank, and how they are reduced.
//
//   replicated   whole, on every rank: one all_reduce a step, in buckets
//   scattered    sums of shards: a unit's gradients are whole while its
//                backward runs and are packed behind it; reduce_scatter over
//                the shards' ranks, then all_reduce over the replicas beside.
//                In ZeRO stage 1 they stay whole until the step's one reduction
//
// Types:  gradients are accumulated and reduced in the type that is asked for.
// Comm:   with G bytes and N ranks a rank sends (N-1)/N of G for a
//         reduce_scatter and of 2 G for an all_reduce.
// Order:  on shm sums are in rank order; no bucket size changes a bit.
// Memory: booked as gradients (core/memory_kind.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/nn/unwritten_gradients.h"
#include "tessera/parallel/data/bundle.h"

namespace tessera::parallel::data {

struct GradientOptions {
  // In which gradients are accumulated and summed over ranks; none: in the
  // parameter's own.
  std::optional<at::ScalarType> dtype = at::kFloat;
  int64_t bucket_bytes = 0;  // of an all_reduce, at most; 0: all at once
  // Zeros are left out where a backward writes (nn/unwritten_gradients.h): only
  // nn's layers and LibTorch's accumulation may add to these gradients.
  bool may_be_unwritten = false;
  // Micro-batches that add to a gradient in a step: rows of small ones wait for
  // each other there (nn/waiting_rows.h) where gradients stay whole meanwhile.
  int64_t batches = 1;
};

class GradientStorage {
 public:
  virtual ~GradientStorage() = default;
  // Of this rank's boxes, once reduced, in the order of the bundle.
  const std::vector<at::Tensor>& shards() const { return local_; }

  // Backwards add to these from here on, where there are several.
  virtual void use() = 0;
  virtual void zero() = 0;
  // Before anybody reads what may be unwritten; reductions do so themselves.
  void complete() {
    if (unwritten_) unwritten_->complete();
  }
  // Whole gradients for a backward, where they do not live.
  virtual void allocate() = 0;
  virtual void begin_reduction(comm::Mode mode) = 0;
  virtual void await_reduction() = 0;
  // Over the replicas beside the shards.
  virtual void begin_sum(comm::Mode mode) = 0;
  virtual void await_sum() = 0;

 protected:
  // `all`: the memory of all whole gradients.
  void zero_or_leave(const at::Tensor& all) {
    if (unwritten_) {
      unwritten_->begin(all);
    } else {
      all.zero_();
    }
  }

  std::vector<at::Tensor> local_;
  std::optional<nn::UnwrittenGradients> unwritten_;
};

// `peers`: the bundle's.
std::unique_ptr<GradientStorage> make_gradients(const Bundle& bundle,
                                                const GradientOptions& options,
                                                comm::Group& shards,
                                                comm::Group& peers);

}  // namespace tessera::parallel::data
