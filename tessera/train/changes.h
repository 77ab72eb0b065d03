// What is other in one configuration than in another: of a checkpoint and of
// the run that goes on from it, or of two ranks.
//
// Texts: configurations as config.json has them, resolved.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/data/sampler.h"
#include "tessera/models/model_config.h"

namespace tessera::train {

// Keys that decide how training goes on and have other values, as
// "optimizer.lr 0.001 -> 0.01". Not those of where and how fast (mesh, comm,
// names); run.steps where the learning rate is scheduled over them.
std::vector<std::string> trained_otherwise(const std::string& saved,
                                           const std::string& now);

// Their losses on held-out data cannot be compared: of other samples, or of
// averages of the weights.
bool validated_otherwise(const std::string& saved, const std::string& now);

// TS_CHECK_CONFIG where the weights of `saved` would be another model here,
// though all shapes agree: other heads, another rope_theta. `source` names it.
void refuse_another_model(const std::string& saved, const std::string& now,
                          const std::string& source);

// Keys by which two models whose shapes agree compute other things, as
// "model.rope_scaling.factor 1 -> 4"; not those of adapters.
std::vector<std::string> computed_otherwise(const models::ModelConfig& model,
                                            const models::ModelConfig& other);

// TS_CHECK_CONFIG where the run of `saved` has another name: both would write
// to one checkpoint.dir.
void refuse_another_run(const std::string& saved, const std::string& now);

// TS_CHECK_CONFIG where data.skip names other batches than `saved` among those
// that were taken in its `step` steps of `samples` samples together, or counts
// them by another batch.global than all steps had. `left_out`: of both, beside.
void refuse_skipping_what_was_taken(const std::string& saved,
                                    const std::string& now, int64_t step,
                                    int64_t samples,
                                    const std::vector<data::Skip>& left_out);

// That every rank has what rank 0 has, but for what is its host's own: paths,
// device, threads. TS_CHECK_CONFIG on every rank, with the same words: ranks
// that train differently would go on without a sign of it.
// Comm: two broadcasts and an all_reduce.
void compare_across(comm::Group& world, const std::string& config);

}  // namespace tessera::train
