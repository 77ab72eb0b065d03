#include "tessera/optim/parameter_groups.h"

#include <c10/util/StringUtil.h>
#include <fnmatch.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <utility>

#include "tessera/core/edit_distance.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::optim {
namespace {

// -1: none.
int64_t group_of(const OptimizerConfig& config, const std::string& name) {
  const auto found =
      std::ranges::find_if(config.groups, [&](const ParameterGroup& group) {
        return std::ranges::any_of(group.match, [&](const std::string& glob) {
          return matches(glob, name);
        });
      });
  return found == config.groups.end() ? -1 : found - config.groups.begin();
}

// "blocks.*.mlp.up.weight" of "blocks.3.mlp.up.weight".
std::string glob_of(const std::string& name) {
  std::string glob;
  for (const char letter : name) {
    const bool is_digit = std::isdigit(static_cast<unsigned char>(letter)) != 0;
    if (!is_digit || glob.empty() || (glob.back() != '.' && glob.back() != '*'))
      glob += letter;
    else if (glob.back() == '.')
      glob += '*';
  }
  return glob;
}

std::string nearest_to(const std::string& glob,
                       const std::vector<std::string>& names) {
  constexpr size_t kNamed = 3, kLongest = 256;
  std::set<std::string> globs;
  for (const auto& name : names) globs.insert(glob_of(name));
  std::vector<std::string> nearest(globs.begin(), globs.end());
  const std::string looked_for = glob.substr(0, kLongest);
  std::ranges::stable_sort(nearest, {}, [&](const std::string& each) {
    return edit_distance(looked_for, each);
  });
  nearest.resize(std::min(nearest.size(), kNamed));
  return some_of(nearest, kNamed);
}

}  // namespace

bool matches(const std::string& glob, const std::string& name) {
  return ::fnmatch(glob.c_str(), name.c_str(), 0) == 0;
}

void require_match(const std::string& key, const std::string& glob,
                   const std::vector<std::string>& names) {
  const bool has_one = std::ranges::any_of(
      names, [&](const std::string& name) { return matches(glob, name); });
  TS_CHECK_CONFIG(has_one, key, " is \"", glob,
                  "\", which matches no parameter that is trained. Nearest: ",
                  nearest_to(glob, names), ".");
}

UpdateWay way_of(const OptimizerConfig& config, const UpdateRule& rule,
                 const std::string& name, bool decays, bool is_matrix) {
  const bool by_others = rule.of_whole != nullptr && !is_matrix;
  UpdateWay way{.rule = by_others ? &update_rule(rule.others) : &rule,
                .betas = {},
                .weight_decay = decays ? config.weight_decay : 0.0};
  way.betas = config.betas.empty() ? way.rule->betas : config.betas;
  if (by_others && config.muon.adamw_lr > 0) {
    way.lr_factor = config.muon.adamw_lr / config.lr;
  }
  const int64_t index = group_of(config, name);
  if (index < 0) return way;
  const ParameterGroup& group = config.groups[index];
  if (group.lr >= 0) way.lr_factor = group.lr / config.lr;
  if (group.weight_decay >= 0) way.weight_decay = group.weight_decay;
  if (!group.betas.empty()) way.betas = group.betas;
  return way;
}

void check_groups(const OptimizerConfig& config,
                  const std::vector<std::string>& names) {
  TS_CHECK_CONFIG(config.muon.adamw_lr == 0 || config.lr > 0,
                  "optimizer.muon.adamw_lr is ", config.muon.adamw_lr,
                  ", which the schedule scales as optimizer.lr, but that is 0. "
                  "Set optimizer.lr.");
  std::set<int64_t> used;
  for (const auto& name : names) used.insert(group_of(config, name));
  for (size_t i = 0; i < config.groups.size(); ++i) {
    const ParameterGroup& group = config.groups[i];
    const std::string key = c10::str("optimizer.groups[", i, "]");
    for (const std::string& glob : group.match) {
      require_match(key + ".match", glob, names);
    }
    TS_CHECK_CONFIG(used.contains(static_cast<int64_t>(i)), key,
                    " gets no parameter: groups before it have all that it "
                    "matches. Put it first, or leave it out.");
    TS_CHECK_CONFIG(group.lr < 0 || config.lr > 0, key, ".lr is ", group.lr,
                    ", which the schedule scales as optimizer.lr, but that "
                    "is 0. Set optimizer.lr.");
  }
}

void drop_idle_groups(OptimizerConfig& config,
                      const std::vector<std::string>& names) {
  for (ParameterGroup& group : config.groups) {
    std::erase_if(group.match, [&](const std::string& glob) {
      return std::ranges::none_of(
          names, [&](const std::string& name) { return matches(glob, name); });
    });
  }
  std::vector<ParameterGroup> kept;
  for (size_t i = 0; i < config.groups.size(); ++i) {
    const bool has_one =
        std::ranges::any_of(names, [&](const std::string& name) {
          return group_of(config, name) == static_cast<int64_t>(i);
        });
    if (has_one) kept.push_back(config.groups[i]);
  }
  config.groups = std::move(kept);
}

}  // namespace tessera::optim
