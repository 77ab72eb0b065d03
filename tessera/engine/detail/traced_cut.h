// What units took in a run whose steps were traced, and how fast its ranks
// were: what pipeline.cut goes by where it names a run's folder.
//
// Errors: TS_CHECK_CONFIG, also of what is in that folder, in the words that it
//         is pipeline.cut which led to it; TS_CHECK_IO where it cannot be read.
#pragma once

#include <vector>

#include "tessera/engine/run_config.h"

namespace tessera::engine::detail {

// Of a micro-batch, by rank and by embedding, layer and head; 0: never seen.
using UnitSeconds = std::vector<std::vector<double>>;

// Refused where the run says nothing of what units will take here, on so many
// ranks.
UnitSeconds seconds_of_run(const RunConfig& config, int64_t world_size);

// Units of as many operations are alike: each takes what all of them take on
// average, over the ranks that were seen to run one, at speed 1.
std::vector<double> means_of_alike(const RunConfig& config,
                                   const std::vector<double>& operations,
                                   const UnitSeconds& seconds,
                                   const std::vector<double>& speeds);

// By layers, which ranks have alike: the mean of those that a rank ran over
// what it took. Of a rank without layers nothing is known: it counts as fast.
std::vector<double> speeds_seen(const UnitSeconds& seconds,
                                const std::vector<double>& means);

}  // namespace tessera::engine::detail
