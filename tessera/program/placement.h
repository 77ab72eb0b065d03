// Where the virtual stages of a pipeline lie: which run of a model's units each
// chunk of each rank holds. The one place that knows.
//
// p ranks along pp hold v chunks each. Activations go from virtual stage to
// virtual stage, gradients back.
//   round robin: chunk c of rank s is virtual stage c p + s.
//   V:           there and back: of odd chunks the ranks count backwards, so
//                that rank s has s, 2 p - 1 - s, 2 p + s ... What turns around
//                stays on its rank.
//   mirrored:    two replicas of p virtual stages, whose micro-batches are
//                each other's complement: chunk 0 of rank s is stage s of the
//                one, chunk 1 is stage p - 1 - s of the other.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::program {

enum class Placement { kRoundRobin, kV, kMirrored };

// A chunk of a rank along pp.
struct Place {
  int64_t stage = 0;
  int64_t chunk = 0;
  bool operator==(const Place&) const = default;
};

struct Pipeline {
  int64_t stages = 1;  // p
  int64_t chunks = 1;  // v; 2 where they are mirrored
  Placement placement = Placement::kRoundRobin;

  // Virtual stages, which are the parts that a model is cut into.
  int64_t num_runs() const;
  int64_t run_of(const Place& place) const;
  // Of a run, in the replica of this chunk where there are two.
  Place place_of(int64_t run, int64_t chunk = 0) const;
  // The ranks that hold a run, ascending.
  std::vector<int64_t> holders_of(int64_t run) const;

  // The place before and the one behind, of the same replica.
  std::optional<Place> before(const Place& place) const;
  std::optional<Place> behind(const Place& place) const;
  bool is_first(const Place& place) const { return run_of(place) == 0; }
  bool is_last(const Place& place) const {
    return run_of(place) == num_runs() - 1;
  }
};

}  // namespace tessera::program
