// What a model is cut by: the costs of embedding, layers and head, and how fast
// ranks are, as pipeline.cut has it.
//
// Errors: TS_CHECK_CONFIG, also of what is in the run that pipeline.cut names;
//         TS_CHECK_IO where that cannot be read.
#pragma once

#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/parallel/pipeline/cut.h"

namespace tessera::engine::detail {

struct CutCosts {
  parallel::pipeline::UnitCosts units;
  std::vector<double> speeds = {};  // of ranks; none: all alike
};

CutCosts cut_costs(const RunConfig& config, const mesh::DeviceMesh& mesh);

// By embedding, layer and head, of numbers by unit: what predicts further ahead
// goes with the head.
std::vector<double> with_head(std::vector<double> by_unit, int64_t layers);

}  // namespace tessera::engine::detail
