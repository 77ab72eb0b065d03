// Shares a model out among the stages of a pipeline, and a micro-batch among
// data-parallel ranks, by what units cost and by how fast ranks are.
//
// Layers:  pipeline.cut says what a part costs, mesh.speeds by what that is
//          divided: a stage is as fast as the slowest of its ranks.
//          pipeline.split wins over both. See parallel/pipeline/cut.h.
// Samples: of those of a micro-batch (batch_config.h) each data-parallel rank
//          has one at least, the others such that the last one is done as early
//          as can be: a data-parallel rank is as fast as the slowest of its
//          stages, with the layers that it has. With pipeline.split, too, it
//          goes by pipeline.cut what these cost, by facts where that names a
//          run: the config.json of a run leads to the same shares.
// Errors:  TS_CHECK_CONFIG, also of what is in the run that pipeline.cut names;
//          TS_CHECK_IO where that cannot be read.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/engine/run_config.h"

namespace tessera::engine {

// Sets pipeline.split and batch.rows where they are not even. REQUIRES: a
// configuration that is completed but for these.
void share_out(RunConfig& config, const mesh::DeviceMesh& mesh);

// How `total` things are shared out among so many, one to each at least, so
// that the most that anybody has over his speed is least. Of equals the slower
// one has fewer. REQUIRES: a thing for each.
std::vector<int64_t> shares_by_speed(int64_t total,
                                     const std::vector<double>& speeds);

// Of each part of the model, in order. REQUIRES: a completed configuration.
std::vector<int64_t> layers_of_parts(const RunConfig& config);

}  // namespace tessera::engine
