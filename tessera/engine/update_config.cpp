#include "tessera/engine/update_config.h"

#include "tessera/core/error.h"
#include "tessera/models/model.h"
#include "tessera/optim/parameter_groups.h"

namespace tessera::engine {

std::vector<std::string> trained_names(const RunConfig& config) {
  std::vector<std::string> names;
  const auto model = models::make_model(config.model);
  for (const auto& parameter : nn::parameters_of(*model)) {
    if (!parameter.spec->is_frozen) names.push_back(parameter.name);
  }
  return names;
}

void ask_for_whole_matrices(RunConfig& config) {
  const optim::OptimizerConfig& optimizer = config.optimizer;
  config.whole_matrices =
      optim::update_rule(optimizer.type).of_whole != nullptr;
  config.orthogonalised_in_bf16 = optimizer.muon.dtype == "bf16";
}

void check_updates(const RunConfig& config) {
  const optim::OptimizerConfig& optimizer = config.optimizer;
  TS_CHECK_CONFIG(!config.validate.ema || optimizer.ema > 0,
                  "validate.ema is true, but optimizer.ema is 0: there is no "
                  "average of the weights. Set optimizer.ema, as 0.999.");
  if (optimizer.groups.empty() && optimizer.muon.adamw_lr == 0) return;
  optim::check_groups(optimizer, trained_names(config));
}

}  // namespace tessera::engine
