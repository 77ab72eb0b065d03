// Which states an optimizer keeps, as far as keys of its section decide it: for
// what goes on from a checkpoint, and says why it cannot.
#pragma once

#include <string>
#include <vector>

#include "tessera/optim/optim_config.h"

namespace tessera::engine {

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

}  // namespace tessera::engine
