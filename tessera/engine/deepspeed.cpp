#include "tessera/engine/deepspeed.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/engine/detail/deepspeed_settings.h"

namespace tessera::engine {
namespace {

using detail::DeepSpeedSetting;
using detail::Json;
using tessera::detail::value_at;

Json values_of(const RunConfig& config) {
  return tessera::detail::parse_json(to_json(config), "the configuration");
}

bool agree(const Json& runs, const DeepSpeedSetting& setting) {
  if (!setting.is_rounded || !runs.is_number()) return runs == setting.value;
  constexpr double kLastBits = 1e-12;
  const double one = runs.get<double>(), other = setting.value.get<double>();
  return std::abs(one - other) <= kLastBits * std::abs(other);
}

// Sets what nobody has given. Returns the defaults among it that are not those
// of Tessera.
std::vector<DeepSpeedSetting> set(const std::vector<DeepSpeedSetting>& settings,
                                  RunConfig& config,
                                  config::Provenance& origins) {
  std::vector<DeepSpeedSetting> defaults;
  for (const bool yielding : {false, true}) {
    for (const auto& setting : settings) {
      if (setting.yields != yielding) continue;
      const Json runs = value_at(values_of(config), setting.key);
      if (config::is_set(origins, setting.key)) {
        TS_CHECK_CONFIG(
            yielding || agree(runs, setting), setting.key, " is ", runs.dump(),
            " (", origins.at(setting.key), "), but ", setting.value.dump(),
            " by ", setting.origin,
            ". Leave it out of one of the two, or give both the same; "
            "\"auto\" in DeepSpeed's file takes the run's.");
        continue;
      }
      config::Section root;
      config.declare(root);
      const auto found = config::resolve(
          root, "{}", "",
          {{setting.key, setting.value.dump(), setting.origin}});
      origins[setting.key] = found.at(setting.key);
      if (setting.is_default && !agree(runs, setting)) {
        defaults.push_back(setting);
      }
    }
  }
  return defaults;
}

}  // namespace

struct DeepSpeed::Impl {
  explicit Impl(const std::string& text, const std::string& source)
      : values(text, source), plain(plain_settings(values)) {}

  void apply(const std::vector<DeepSpeedSetting>& settings, RunConfig& config,
             config::Provenance& origins) {
    for (auto& each : set(settings, config, origins)) {
      defaults.push_back(std::move(each));
    }
  }

  detail::DeepSpeedValues values;
  detail::DeepSpeedSettings plain;
  std::vector<DeepSpeedSetting> defaults;  // DeepSpeed's, that were set
};

DeepSpeed::DeepSpeed(const std::string& path) {
  TS_CHECK_CONFIG(std::filesystem::is_regular_file(path), path,
                  ": there is no such configuration of DeepSpeed's.");
  impl_ = std::make_unique<Impl>(tessera::detail::read_json_text(path), path);
}

DeepSpeed::DeepSpeed(const std::string& text, const std::string& source)
    : impl_(std::make_unique<Impl>(text, source)) {}

DeepSpeed::~DeepSpeed() = default;

void DeepSpeed::apply(RunConfig& config, config::Provenance& origins) {
  impl_->apply(impl_->plain.settings, config, origins);
  const std::string& compute = config.precision.compute;
  const auto* enabled = impl_->values.find(compute + ".enabled");
  TS_CHECK_CONFIG(!enabled || enabled->value == true, "precision.compute is ",
                  compute, " (", origins.at("precision.compute"),
                  "), but false by ", enabled->origin,
                  ". Leave one of the two out, or write \"auto\" in "
                  "DeepSpeed's file.");
  impl_->apply(settings_that_follow(impl_->values, config), config, origins);
}

void DeepSpeed::apply_batch(RunConfig& config, int64_t world_size,
                            config::Provenance& origins) {
  impl_->apply(batch_settings(impl_->values, config, origins, world_size),
               config, origins);
}

std::string DeepSpeed::check_searched_batch(
    const RunConfig& config, const config::Provenance& origins) const {
  return detail::check_searched_batch(impl_->values, config, origins);
}

std::string DeepSpeed::without_effect() const {
  // By reason, in the order of the first key of each.
  std::vector<std::pair<std::string, std::vector<std::string>>> reasons;
  auto idle = impl_->values.without_effect();
  std::ranges::copy(impl_->plain.without_effect, std::back_inserter(idle));
  for (const auto& [name, why] : idle) {
    const auto found = std::ranges::find_if(
        reasons, [&](const auto& each) { return each.first == why; });
    auto& names = found == reasons.end() ? reasons.emplace_back(why, 0).second
                                         : found->second;
    names.push_back(name);
  }
  std::string text;
  for (const auto& [why, names] : reasons) {
    text +=
        (text.empty() ? "" : "; ") + c10::Join(", ", names) + " (" + why + ")";
  }
  return text.empty() ? ""
                      : impl_->values.source() +
                            " has keys without effect here: " + text;
}

std::vector<std::string> DeepSpeed::left_open(const RunConfig& config) const {
  std::vector<std::string> found;
  const std::string& source = impl_->values.source();
  const auto& optimizer = config.optimizer;
  if (!impl_->values.has_section("optimizer")) {
    found.push_back(c10::str(
        source, " has no optimizer: it is the run's, or Tessera's default: ",
        optimizer.type, ", lr ", optimizer.lr, ", betas ",
        Json(optimizer.betas).dump(), ", eps ", optimizer.eps,
        ", weight_decay ", optimizer.weight_decay));
  }
  std::vector<std::string> defaults;
  for (const auto& each : impl_->defaults) {
    defaults.push_back(each.key + " " + each.value.dump());
  }
  if (!defaults.empty()) {
    found.push_back(c10::str("DeepSpeed's defaults, where ", source,
                             " says nothing: ", c10::Join(", ", defaults)));
  }
  return found;
}

std::string deepspeed_table() { return detail::deepspeed_table(); }

}  // namespace tessera::engine
