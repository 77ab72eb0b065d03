#include "tessera/engine/update_config.h"

#include <c10/util/StringUtil.h>

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
  config.orthogonal_steps = optimizer.muon.steps;
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

// The groups that some parameter with betas is in: of a rule for whole matrices
// those that another rule updates beside it.
std::set<int64_t> groups_with_betas(const RunConfig& config) {
  const auto model = models::make_model(config.model);
  std::set<int64_t> used;
  for (const auto& parameter : nn::parameters_of(*model)) {
    if (models::is_hidden_matrix(*parameter.spec, model->num_units())) continue;
    used.insert(group_of(config.optimizer.groups, parameter.name));
  }
  return used;
}

}  // namespace

std::vector<std::string> betas_without_effect(const RunConfig& config) {
  const auto& groups = config.optimizer.groups;
  const std::string& type = config.optimizer.type;
  std::vector<std::string> found;
  if (std::ranges::all_of(groups,
                          [](const auto& g) { return g.betas.empty(); })) {
    return found;
  }
  const optim::UpdateRule& rule = optim::update_rule(type);
  const bool is_used = rule.uses("betas");
  if (is_used && rule.of_whole == nullptr) return found;
  const auto used = is_used ? groups_with_betas(config) : std::set<int64_t>();
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].betas.empty() || used.contains(static_cast<int64_t>(i))) {
      continue;
    }
    found.push_back(c10::str(
        "optimizer.groups[", i, "].betas is not used by optimizer.type ", type,
        is_used ? ": the group has hidden matrices alone" : ""));
  }
  return found;
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
