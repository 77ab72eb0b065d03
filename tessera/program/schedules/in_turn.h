// What the schedules of one direction share: a rank's forwards and backwards in
// turn, behind some forwards ahead; and backwards whose weight parts come late.
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

// The tasks of one kind in the order in which a rank takes them: groups of
// `group` micro-batches go through one chunk after the other, backward through
// the last chunk first.
std::vector<Task> in_groups(const Shape& shape, Op op, int64_t group);

// The forwards, and the backwards in turn with them behind `ahead` forwards.
// `paired`: a forward and the backward behind it are one turn, as chunks need
// it, whose messages cross.
std::vector<Turn> in_turn(const std::vector<Task>& forwards,
                          const std::vector<Task>& backwards, int64_t ahead,
                          bool paired = false);

// The same with backwards in two parts: the weights' part of each comes behind
// the input part of the `late`-th backward after it, or at the end.
std::vector<Turn> with_late_weights(const std::vector<Task>& forwards,
                                    const std::vector<Task>& backwards,
                                    int64_t ahead, int64_t late);

}  // namespace tessera::program::schedules
