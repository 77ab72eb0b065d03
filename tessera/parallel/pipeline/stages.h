// Pipeline parallelism: which rank along pp holds which units of a model.
//
// Cut:    the virtual stages of program/placement.h are runs of layers, in
//         order. The embedding goes with the first run, the last norm, the
//         head and what predicts further ahead with the last. Layers are
//         shared out evenly, the first runs taking one more where they do not
//         divide, or as `split` says; see cut.h for splits that are balanced.
//         What several units compute with (a tied embedding) is held by the
//         stages of all of them; its gradient is their sum. So is all of a run
//         that two stages hold.
// Comm:   none here; between stages (B, T, D) of each micro-batch, each way.
// Errors: TS_CHECK_CONFIG, by check(), with the nearest values that fit.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/model.h"
#include "tessera/parallel/pipeline/pipeline_config.h"

namespace tessera::parallel::pipeline {

// Whether layers and micro-batches suffice.
void check(const models::ModelConfig& model, int64_t num_microbatches,
           const mesh::DeviceMesh& mesh, const PipelineConfig& config);

// The units of every run, in order: the embedding, layers, so many units that
// predict further ahead, the head.
std::vector<std::vector<int64_t>> units_of_runs(int64_t layers, int64_t count,
                                                const PipelineConfig& config,
                                                int64_t ahead = 0);

// Sets which stages hold the model's parameters, and returns, by stage and
// chunk, the units that run there.
std::vector<std::vector<std::vector<int64_t>>> apply(
    models::Model& model, const mesh::DeviceMesh& mesh,
    const PipelineConfig& config);

}  // namespace tessera::parallel::pipeline
