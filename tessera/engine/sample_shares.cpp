#include "tessera/engine/sample_shares.h"

#include <algorithm>
#include <numeric>

namespace tessera::engine {

SampleRun SampleShares::of(int64_t share, int64_t microbatch) const {
  const int64_t rows = rows_of(share);
  const int64_t before =
      rows_.empty()
          ? share * micro_
          : std::accumulate(rows_.begin(), rows_.begin() + share, int64_t{0});
  return {before * microbatches_ + microbatch * rows, rows};
}

int64_t rank_with_most_samples(const RunConfig& config,
                               const mesh::DeviceMesh& mesh,
                               const mesh::Coord& coord) {
  const auto& rows = config.batch.rows;
  if (rows.empty()) return mesh.rank_at(coord);
  return mesh
      .peers(mesh.rank_at(coord),
             {mesh::Axis::kDpReplicate, mesh::Axis::kDpShard})
      .at(std::ranges::max_element(rows) - rows.begin());
}

}  // namespace tessera::engine
