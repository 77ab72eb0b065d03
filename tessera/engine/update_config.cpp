#include "tessera/engine/update_config.h"

#include <algorithm>
#include <set>

#include "tessera/core/error.h"
#include "tessera/models/hidden_matrix.h"
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

namespace {

// The first group that means it, as way_of() takes it.
int64_t group_of(const std::vector<optim::ParameterGroup>& groups,
                 const std::string& name) {
  const auto means = [&](const optim::ParameterGroup& group) {
    return std::ranges::any_of(group.match, [&](const std::string& glob) {
      return optim::matches(glob, name);
    });
  };
  return std::ranges::find_if(groups, means) - groups.begin();
}

// Of a rule for whole matrices, beside which another has betas.
void check_betas(const RunConfig& config) {
  const optim::OptimizerConfig& optimizer = config.optimizer;
  const auto model = models::make_model(config.model);
  std::set<int64_t> used;
  for (const auto& parameter : nn::parameters_of(*model)) {
    if (models::is_hidden_matrix(*parameter.spec, model->num_units())) continue;
    used.insert(group_of(optimizer.groups, parameter.name));
  }
  for (size_t i = 0; i < optimizer.groups.size(); ++i) {
    TS_CHECK_CONFIG(optimizer.groups[i].betas.empty() ||
                        used.contains(static_cast<int64_t>(i)),
                    "optimizer.groups[", i,
                    "].betas: the group has hidden matrices alone, which "
                    "optimizer.type ",
                    optimizer.type, " updates without betas. Leave them out.");
  }
}

}  // namespace

void check_updates(const RunConfig& config) {
  const optim::OptimizerConfig& optimizer = config.optimizer;
  TS_CHECK_CONFIG(!config.validate.ema || optimizer.ema > 0,
                  "validate.ema is true, but optimizer.ema is 0: there is no "
                  "average of the weights. Set optimizer.ema, as 0.999.");
  if (optimizer.groups.empty() && optimizer.muon.adamw_lr == 0) return;
  optim::check_groups(optimizer, trained_names(config));
  if (config.whole_matrices) check_betas(config);
}

}  // namespace tessera::engine
