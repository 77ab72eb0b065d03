#include "tessera/engine/kept_states.h"

#include <c10/util/StringUtil.h>

#include "tessera/core/config.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/optim/registry.h"

namespace tessera::engine {
namespace {

std::vector<std::string> moments_of(const optim::OptimizerConfig& optimizer) {
  std::vector<std::string> names;
  const auto add = [&](const optim::UpdateRule& rule) {
    for (const auto& moment : rule.moments_with(optimizer)) {
      names.push_back(moment.name);
    }
  };
  const auto& rule = optim::update_rule(optimizer.type);
  add(rule);
  if (!rule.others.empty()) add(optim::update_rule(rule.others));
  return names;
}

std::string type_of(const KeptStates& of) {
  const std::string& said = of.optimizer.state_dtype;
  return said == "auto" ? of.masters : said;
}

}  // namespace

std::vector<std::string> other_states(const KeptStates& saved,
                                      const KeptStates& now) {
  const auto before = detail::Json::parse(to_json(saved.optimizer));
  const auto after = detail::Json::parse(to_json(now.optimizer));
  std::vector<std::string> told;
  const auto tell = [&](const char* key) {
    if (before[key] == after[key]) return;
    told.push_back(c10::str("optimizer.", key, " is ", before[key].dump(),
                            " in it and ", after[key].dump(), " in this run"));
  };
  if (moments_of(saved.optimizer) != moments_of(now.optimizer)) {
    tell("type");
    tell("momentum");
  }
  if (type_of(saved) != type_of(now)) tell("state_dtype");
  if ((saved.optimizer.ema > 0) != (now.optimizer.ema > 0)) tell("ema");
  return told;
}

std::string to_json(const optim::OptimizerConfig& optimizer) {
  optim::OptimizerConfig copy = optimizer;
  config::Section root;
  copy.declare(root);
  return config::to_json(root);
}

optim::OptimizerConfig optimizer_from(const std::string& json,
                                      const std::string& source) {
  optim::OptimizerConfig optimizer;
  config::Section root;
  optimizer.declare(root);
  config::resolve(root, json, source, {});
  return optimizer;
}

std::string to_json(const optim::LossScaleState& scale) {
  return detail::Json{{"scale", scale.scale},
                      {"finite_in_a_row", scale.finite_in_a_row},
                      {"hysteresis_left", scale.hysteresis_left}}
      .dump();
}

optim::LossScaleState loss_scale_from(const std::string& json,
                                      const std::string& source) {
  const detail::Json state = detail::parse_json(json, source);
  for (const char* key : {"scale", "finite_in_a_row", "hysteresis_left"}) {
    TS_CHECK_IO(state.is_object() && state.contains(key), source,
                " lacks the "
                "key ",
                key, ".");
  }
  const auto count = [&](const char* key) {
    return detail::as_int(state[key], c10::str(source, ": ", key));
  };
  const std::string at = source + ": scale";
  const double scale = detail::as_double(state["scale"], at);
  TS_CHECK_IO(scale > 0, at, ": it is ", scale, ", and must be above 0.");
  return {.scale = scale,
          .finite_in_a_row = count("finite_in_a_row"),
          .hysteresis_left = count("hysteresis_left")};
}

}  // namespace tessera::engine
