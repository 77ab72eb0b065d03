// The section batch of the configuration: how the samples of a step are cut.
//
// global = micro x accumulation x data-parallel degree. With `uneven`, where
// that has no solution, only the micro-batches are of a size, as few as can be:
// of each a rank has one sample at least and `micro` in the mean at most, and
// some ranks one fewer than others. So a run goes on with the same steps on as
// many ranks as there are.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::engine {

struct BatchConfig {
  int64_t global = 16;
  int64_t micro = 0;  // 0: accumulation 1
  bool uneven = false;
  // No key: of a micro-batch, by data-parallel rank, where these have not as
  // many; `micro` is their mean, rounded up. See sample_shares.h.
  std::vector<int64_t> rows = {};
  void declare(config::Section& section);

  // Sets `micro` to the mean share, rounded up. `degree`: ranks that see other
  // samples, each of world_size / degree ranks. TS_CHECK_CONFIG, with the
  // nearest values, where the samples cannot be cut so.
  void complete(int64_t degree, int64_t world_size);
  // Micro-batches of a step. REQUIRES: complete().
  int64_t microbatches(int64_t degree) const;

 private:
  void complete_unevenly(int64_t degree);
  void check_count(int64_t degree) const;
};

}  // namespace tessera::engine
