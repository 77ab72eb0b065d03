// What the optimizer's section asks of other sections, and of the model.
#pragma once

#include <string>
#include <vector>

#include "tessera/engine/run_config.h"

namespace tessera::engine {

// Names of the parameters that are trained. REQUIRES, here and below: a model
// of known sizes.
std::vector<std::string> trained_names(const RunConfig& config);

// Sets what strategies do for an optimizer that updates matrices whole.
void ask_for_whole_matrices(RunConfig& config);

// TS_CHECK_CONFIG: parameter groups that match nothing, rates that are scaled
// from zero, a validation of averages that are not kept.
void check_updates(const RunConfig& config);

// Of groups whose rule has none: a line each.
std::vector<std::string> betas_without_effect(const RunConfig& config);

}  // namespace tessera::engine
