#include "tessera/program/placement.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::program {

int64_t Pipeline::num_runs() const {
  return placement == Placement::kMirrored ? stages : stages * chunks;
}

int64_t Pipeline::run_of(const Place& place) const {
  const int64_t first = place.chunk * stages;
  switch (placement) {
    case Placement::kRoundRobin:
      return first + place.stage;
    case Placement::kV:
      return first +
             (place.chunk % 2 == 0 ? place.stage : stages - 1 - place.stage);
    case Placement::kMirrored:
      return place.chunk == 0 ? place.stage : stages - 1 - place.stage;
  }
  TORCH_INTERNAL_ASSERT(false, "a placement without a rule");
}

Place Pipeline::place_of(int64_t run, int64_t chunk /* = 0 */) const {
  const int64_t along = run % stages, back = stages - 1 - along;
  switch (placement) {
    case Placement::kRoundRobin:
      return {along, run / stages};
    case Placement::kV:
      return {run / stages % 2 == 0 ? along : back, run / stages};
    case Placement::kMirrored:
      return {chunk == 0 ? along : back, chunk};
  }
  TORCH_INTERNAL_ASSERT(false, "a placement without a rule");
}

std::vector<int64_t> Pipeline::holders_of(int64_t run) const {
  std::vector<int64_t> holders = {place_of(run).stage};
  if (placement == Placement::kMirrored) {
    holders.push_back(place_of(run, 1).stage);
    std::ranges::sort(holders);
    holders.erase(std::ranges::unique(holders).begin(), holders.end());
  }
  return holders;
}

std::optional<Place> Pipeline::before(const Place& place) const {
  const int64_t run = run_of(place);
  if (run == 0) return std::nullopt;
  return place_of(run - 1, place.chunk);
}

std::optional<Place> Pipeline::behind(const Place& place) const {
  const int64_t run = run_of(place);
  if (run == num_runs() - 1) return std::nullopt;
  return place_of(run + 1, place.chunk);
}

}  // namespace tessera::program
