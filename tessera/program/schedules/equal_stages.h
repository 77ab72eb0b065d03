// A schedule by itself: stages of one rank each, all of the same length, and
// messages. What a schedule is worth, before there is a model.
#pragma once

#include <vector>

#include "tessera/program/costs.h"
#include "tessera/program/schedules/schedule.h"
#include "tessera/program/simulator.h"

namespace tessera::program::schedules {

// The programs in whole chunks, by rank along pp: lowered as ranks run them,
// or as the schedule has them: the same where messages take no time. Of so many
// steps where these go on (schedules::steps).
// REQUIRES: takes(schedule, shape).
std::vector<RankProgram> programs_of(const Schedule& schedule,
                                     const Shape& shape, bool lowered = true,
                                     int64_t count = 1);

// Lane 0 is the pipeline, lane 1 the world.
Simulation simulate(const std::vector<RankProgram>& programs,
                    const Costs& costs);

// `times`: of a micro-batch on a rank, all in all. `message`: how long one is
// on its way.
Simulation simulate(const Schedule& schedule, const Shape& shape,
                    const Times& times, double message = 0, bool lowered = true,
                    int64_t count = 1);

}  // namespace tessera::program::schedules
