// Ranks sorted into classes: two are in one class if they run the same program
// and their groups, lane by lane, are equally large and have members of the
// same classes: along the pipeline in order, elsewhere no matter how many of
// each. The coarsest such sorting, found by refining that of the programs.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/program/world.h"

namespace tessera::program::detail {

struct Classes {
  std::vector<int64_t> of_rank;
  std::vector<int64_t> first;  // by class: its lowest rank, which stands for it
};

Classes sort_ranks(const World& world);

}  // namespace tessera::program::detail
