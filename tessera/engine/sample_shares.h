// Which of a step's samples a data-parallel rank takes.
//
// Each takes a run of the step's samples, micro-batch by micro-batch, as many
// in each as its share of a micro-batch is: batch.micro, or what batch.rows
// says. Together they take every sample once, whatever the shares.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/engine/run_config.h"

namespace tessera::engine {

struct SampleRun {
  int64_t first = 0, count = 0;  // of the step's samples
};

class SampleShares {
 public:
  // REQUIRES: a completed configuration.
  explicit SampleShares(const RunConfig& config)
      : micro_(config.batch.micro),
        microbatches_(accumulation(config)),
        rows_(config.batch.rows) {}

  // Of a micro-batch on the data-parallel rank `share`.
  int64_t rows_of(int64_t share) const {
    return rows_.empty() ? micro_ : rows_.at(share);
  }
  SampleRun of(int64_t share, int64_t microbatch) const;

 private:
  int64_t micro_, microbatches_;
  std::vector<int64_t> rows_;  // empty: all have as many
};

// Of the ranks that see other samples than that at `coord`, at its place
// otherwise, the first one of those that have the most.
int64_t rank_with_most_samples(const RunConfig& config,
                               const mesh::DeviceMesh& mesh,
                               const mesh::Coord& coord);

// Of the same ranks the first one of each number of samples, fewest first.
std::vector<int64_t> ranks_by_samples(const RunConfig& config,
                                      const mesh::DeviceMesh& mesh,
                                      const mesh::Coord& coord);

}  // namespace tessera::engine
