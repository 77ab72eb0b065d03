#include "tessera/engine/sample_shares.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <ranges>

namespace tessera::engine {

SampleRun SampleShares::of(int64_t share, int64_t microbatch) const {
  const int64_t rows = rows_of(share);
  const int64_t before =
      rows_.empty()
          ? share * micro_
          : std::accumulate(rows_.begin(), rows_.begin() + share, int64_t{0});
  return {before * microbatches_ + microbatch * rows, rows};
}

std::vector<int64_t> ranks_by_samples(const RunConfig& config,
                                      const mesh::DeviceMesh& mesh,
                                      const mesh::Coord& coord) {
  const int64_t rank = mesh.rank_at(coord);
  const auto& rows = config.batch.rows;
  if (rows.empty()) return {rank};
  const auto peers =
      mesh.peers(rank, {mesh::Axis::kDpReplicate, mesh::Axis::kDpShard});
  std::map<int64_t, int64_t> ranks;
  for (size_t i = 0; i < rows.size(); ++i) ranks.try_emplace(rows[i], peers[i]);
  const auto found = ranks | std::views::values;
  return {found.begin(), found.end()};
}

int64_t rank_with_most_samples(const RunConfig& config,
                               const mesh::DeviceMesh& mesh,
                               const mesh::Coord& coord) {
  return ranks_by_samples(config, mesh, coord).back();
}

}  // namespace tessera::engine
