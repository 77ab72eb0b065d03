// Batches that the first rank of a group reads and all of it get.
//
// One is held, while another may be on its way: begin (await turn begin)*
// await turn. A batch travels as one tensor of int64: whether documents begin
// is known, how many of the global batch's tokens are targets, by depth of
// prediction, then inputs, targets and, where documents are kept apart, where
// they begin, each (M, B, T): M micro-batches of B samples.
// Comm:    one broadcast over the group a batch.
// Threads: as comm::Group: one thread a rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/data/dataset.h"
#include "tessera/engine/run_config.h"

namespace tessera::engine {

struct BatchExtent {
  int64_t microbatches = 1;
  int64_t samples = 1;  // of a micro-batch
  int64_t tokens = 1;   // of a sample, on all ranks of cp
  bool documents = false;
  int64_t depths = 0;        // of prediction, beyond the next token
  int64_t elements() const;  // of the tensor that travels
};

// Of a step in which a micro-batch has so many samples (sample_shares.h).
// REQUIRES: a completed configuration.
BatchExtent extent_of_step(const RunConfig& config, int64_t samples);

// What a rank that reads has to read.
struct Reading {
  std::function<data::Batch(int64_t microbatch)> microbatch;
  // Of the global batch; or none.
  std::function<int64_t(int64_t depth)> num_targets = {};
};

class BatchShare {
 public:
  // REQUIRES: it outlives this.
  explicit BatchShare(comm::Group& group) : group_(group) {}

  // Reads, where this rank does, and begins to move. `key`: which batch it is,
  // the same on all ranks of the group. REQUIRES: none is on its way.
  void begin(int64_t key, const BatchExtent& extent, const Reading& reading,
             comm::Mode mode);
  // What was begun, if anything was, is here.
  void await();
  // The key of what was begun last and has not been held yet; none: nothing.
  std::optional<int64_t> coming() const;
  // What has come takes the place of what is held. REQUIRES: await().
  void turn();

  // Of what is held: views, which live as long as it is.
  data::Batch microbatch(int64_t microbatch) const;
  std::vector<int64_t> num_targets() const;  // by depth

 private:
  struct Moved {
    int64_t key = 0;
    BatchExtent extent;
    at::Tensor tensor;  // (elements)
  };

  comm::Group& group_;
  std::optional<Moved> held_, coming_;
  comm::Work work_;
};

}  // namespace tessera::engine
