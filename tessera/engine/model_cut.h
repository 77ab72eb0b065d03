// Shares a model out among the stages of a pipeline, and a micro-batch among
// data-parallel ranks, by what units cost and by how fast ranks are.
//
// Layers:  pipeline.cut says what a part costs, mesh.speeds by what that is
//          divided: a stage is as fast as the slowest of its ranks.
//          pipeline.split wins over both. See parallel/pipeline/cut.h.
// Samples: of those of a micro-batch (batch_config.h) each data-parallel rank
//          has one at least, the others such that the last one is done as early
//          as can be: a data-parallel rank is as fast as the slowest of its
//          stages, with the layers that it has.
// Errors:  TS_CHECK_CONFIG, also of what is in the run that pipeline.cut names;
//          TS_CHECK_IO where that cannot be read.
#pragma once

#include <string>
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

// "layers 5, 3 by facts": of each part of the model. REQUIRES: a completed
// configuration.
std::string split_text(const RunConfig& config);
// Where that is from: "evenly", "by facts and mesh.speeds".
std::string cut_text(const RunConfig& config);
// "embedding 1.2ms, a layer 3.4ms, head 9.8ms of a micro-batch; speeds 1, 0.5":
// what the run that pipeline.cut names has shown. Empty: none was asked.
std::string seen_text(const RunConfig& config);
// "3, 1": of a micro-batch, by data-parallel rank; "2" where all have as many.
std::string rows_text(const RunConfig& config);
// The same as a sentence, with the reason; "" where all have as many.
std::string shares_text(const RunConfig& config);

// Speeds and cuts that were asked for and change nothing, each with the reason.
std::vector<std::string> idle_cuts(const RunConfig& config);

}  // namespace tessera::engine
