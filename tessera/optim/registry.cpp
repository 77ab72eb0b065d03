#include "tessera/optim/registry.h"

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/lion.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/sgd.h"

namespace tessera::optim {

const std::vector<UpdateRule>& update_rules() {
  static const std::vector<UpdateRule> rules = {
      {.name = "adamw",
       .update = adamw,
       .moments = {{"exp_avg", 1}, {"exp_avg_sq", 2}},
       .keys = {"betas", "eps"},
       .betas = {0.9, 0.95},
       .source = "Loshchilov and Hutter 2019, arXiv 1711.05101",
       .pace = adamw_pace},
      {.name = "adam",
       .update = adam,
       .moments = {{"exp_avg", 1}, {"exp_avg_sq", 2}},
       .keys = {"betas", "eps"},
       .betas = {0.9, 0.999},
       .source = "Kingma and Ba 2015, arXiv 1412.6980",
       .pace = adam_pace},
      {.name = "sgd",
       .update = sgd,
       .moments = {{"momentum", 1, &OptimizerConfig::momentum}},
       .keys = {"momentum"},
       .betas = {},
       .source = "Sutskever et al. 2013, ICML"},
      {.name = "lion",
       .update = lion,
       .moments = {{"exp_avg", 1}},
       .keys = {"betas"},
       .betas = {0.9, 0.99},
       .source = "Chen et al. 2023, arXiv 2302.06675",
       .by_sign = true},
      {.name = "muon",
       .update = muon,
       .moments = {{"momentum", 1}},
       .keys = {"betas", "eps"},
       .betas = {0.9, 0.95},
       .source = "Keller Jordan et al. 2024, kellerjordan.github.io/posts/muon",
       .by_sign = true,
       .piece = muon_piece,
       .of_whole = muon_direction,
       .others = "adamw"},
  };
  return rules;
}

const UpdateRule& update_rule(const std::string& name) {
  const auto& rules = update_rules();
  const auto found = std::ranges::find(rules, name, &UpdateRule::name);
  TS_CHECK_CONFIG(found != rules.end(), "optimizer.type '", name,
                  "' is not built. Use one of ", some_of(optimizer_names(), 16),
                  ".");
  return *found;
}

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const UpdateRule& rule : update_rules()) names.push_back(rule.name);
  return names;
}

bool UpdateRule::uses(const std::string& key) const {
  return std::ranges::find(keys, key) != keys.end();
}

std::vector<Moment> UpdateRule::moments_with(
    const OptimizerConfig& config) const {
  std::vector<Moment> kept;
  for (const Moment& moment : moments) {
    const bool always = moment.only_with == nullptr;
    if (always || config.*moment.only_with != 0.0) kept.push_back(moment);
  }
  return kept;
}

}  // namespace tessera::optim
