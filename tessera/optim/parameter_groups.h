// How one parameter is updated: by which rule, and with whose numbers.
//
// Errors: TS_CHECK_CONFIG, before ranks start: check_groups().
#pragma once

#include <string>
#include <vector>

#include "tessera/optim/registry.h"

namespace tessera::optim {

struct UpdateWay {
  const UpdateRule* rule = nullptr;
  std::vector<double> betas;
  double lr_factor = 1;  // of optimizer.lr, whatever the schedule makes of it
  double rate = 0;       // above 0: in place of all of that
  double weight_decay = 0;  // 0 for those that do not decay
  bool operator==(const UpdateWay&) const = default;
};

// Of a parameter that the first group matches, or none. `rule`: of
// optimizer.type. `decays`: where no group says.
UpdateWay way_of(const OptimizerConfig& config, const UpdateRule& rule,
                 const std::string& name, bool decays, bool is_matrix);

// Whether a glob of parameters means this one.
bool matches(const std::string& glob, const std::string& name);

// TS_CHECK_CONFIG that it means one of these, of those that are trained. `key`:
// which says so.
void require_match(const std::string& key, const std::string& glob,
                   const std::vector<std::string>& names);

// That every glob names a parameter, every group gets one, and no rate is
// scaled from zero. `names`: of all parameters that are trained.
void check_groups(const OptimizerConfig& config,
                  const std::vector<std::string>& names);

// Leaves out what check_groups() would refuse of these, as of a smaller model.
void drop_idle_groups(OptimizerConfig& config,
                      const std::vector<std::string>& names);

}  // namespace tessera::optim
