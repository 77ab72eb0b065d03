// Cuts a model into the parts of a pipeline so that the rank that has the most
// to do has the least: its parts' time over the rank's speed.
//
// A part is a run of layers: exactly the best of all cuts where a rank holds
// one part, by dynamic programming. Of equally good ones that in which the
// fullest rank holds the fewest bytes, then the evenest.
// Where ranks hold several parts, the cut whose most loaded part has the least
// to do, and from there on layers move one by one between parts for as long as
// that makes ranks more even.
// Cost:   parts x layers^2 steps, and as many for each layer that moves.
// No rank, no communication.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/program/placement.h"

namespace tessera::parallel::pipeline {

// By unit: the embedding, the layers, the head with the loss.
struct UnitCosts {
  std::vector<double> time;  // of a micro-batch, in any unit
  // With recompute.mode minimal: its forward again, once for every unit of its
  // part behind it, and once more where other stages follow; none: all once.
  std::vector<double> replay = {};
  // Held all the time, and of each micro-batch that is alive; none: unknown.
  std::vector<double> state_bytes = {}, kept_bytes = {};
  // The former on every stage but the first, where that holds less than others;
  // none: all alike.
  std::vector<double> later_state_bytes = {};
};

struct CutRules {
  program::Pipeline pipeline;
  std::vector<double> speeds = {};  // of each stage; none: all alike
  // The first and the last part may have no layer, only the embedding or the
  // head: where their time is known.
  bool bare_ends = false;
};

// Layers of each part. REQUIRES: a layer for each part.
std::vector<int64_t> balanced_split(const UnitCosts& costs,
                                    const CutRules& rules);

// By stage: the time of its parts, of so many layers each.
std::vector<double> loads_of(const UnitCosts& costs,
                             const program::Pipeline& pipeline,
                             const std::vector<int64_t>& split);

}  // namespace tessera::parallel::pipeline
