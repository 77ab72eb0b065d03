// What a checkpoint says beside its tensors of the states that an update keeps:
// for what goes on from it, or says why it cannot.
#pragma once

#include <string>
#include <vector>

#include "tessera/optim/loss_scale.h"
#include "tessera/optim/optim_config.h"

namespace tessera::engine {

// What decides which states an optimizer keeps.
struct KeptStates {
  optim::OptimizerConfig optimizer;
  std::string masters = "fp32";  // type of the weights that are updated
};

// The keys by which two keep other states, each with both values:
// "optimizer.ema is 0.9 in it and 0.0 in this run". None: they keep the same.
std::vector<std::string> other_states(const KeptStates& saved,
                                      const KeptStates& now);

// The section, as JSON, and back. `source` names it; TS_CHECK_CONFIG.
std::string to_json(const optim::OptimizerConfig& optimizer);
optim::OptimizerConfig optimizer_from(const std::string& json,
                                      const std::string& source);

// The state, as members of a JSON object, and back; others may stand beside
// them. `source` names it; TS_CHECK_IO.
std::string to_json(const optim::LossScaleState& scale);
optim::LossScaleState loss_scale_from(const std::string& json,
                                      const std::string& source);

}  // namespace tessera::engine
