// A step that is computed without an update, to look at what each rank's own
// backwards compute.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/engine/rank_model.h"

namespace tessera::train {

// Hears of a parameter's gradient behind each backward of its unit, before
// anything is reduced: with those of the micro-batches before, where they add
// up.
using HearsGradient =
    std::function<void(const std::string& parameter, int64_t microbatch,
                       const at::Tensor& gradient)>;

// Comm:     as a step, collective over the world.
// REQUIRES: no step is under way.
void compute_again(engine::RankModel& model, engine::StepInput input,
                   const HearsGradient& hears);

}  // namespace tessera::train
