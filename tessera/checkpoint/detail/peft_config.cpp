#include "tessera/checkpoint/detail/peft_config.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>

#include "tessera/checkpoint/detail/peft_adapter.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint::detail {
namespace {

// Keys that may say anything: what is told apart here by lines of its own, of
// whom and for whom the adapters are, and what only counts beside another key
// that is refused, or before adapters are trained. Any other key may make them
// adapters of another kind.
constexpr std::string_view kHarmless[] = {"peft_type",
                                          "init_lora_weights",
                                          "bias",
                                          "r",
                                          "lora_alpha",
                                          "rank_pattern",
                                          "alpha_pattern",
                                          "lora_dropout",
                                          "target_modules",
                                          "task_type",
                                          "auto_mapping",
                                          kPeftBase,
                                          "revision",
                                          "peft_version",
                                          "inference_mode",
                                          "fan_in_fan_out",
                                          "merge_weights",
                                          "runtime_config",
                                          "layers_pattern",
                                          "megatron_core",
                                          "qalora_group_size",
                                          "loftq_config",
                                          "eva_config",
                                          "corda_config",
                                          "lora_ga_config"};

// But for how a decimal number is rounded.
bool is_near(double one, double other) {
  return std::abs(one - other) <= 1e-9 * std::abs(other);
}

// What the pattern says of a layer, as PEFT looks it up: by its name, or the
// end of that behind a dot. nullptr: nothing.
const Json* pattern_of(const Json& json, const char* key,
                       const std::string& layer) {
  if (says_nothing(json, key)) return nullptr;
  for (const auto& item : json[key].items()) {
    if (layer == item.key() || layer.ends_with("." + item.key())) {
      return &item.value();
    }
  }
  return nullptr;
}

}  // namespace

Json peft_config(const std::string& folder) {
  using tessera::detail::parse_json, tessera::detail::read_json_text;
  const std::string path = folder + kPeftConfigFile;
  Json json = parse_json(read_json_text(path), path);
  TS_CHECK_CONFIG(json.is_object(), path, ": must be a JSON object.");
  return json;
}

bool says_nothing(const Json& json, const char* key) {
  if (!json.contains(key)) return true;
  const Json& value = json[key];
  return value.is_null() || value == Json(false) || value == Json("") ||
         ((value.is_array() || value.is_object()) && value.empty());
}

void refuse_other_kinds(const Json& json, const std::string& path) {
  const auto refuse = [&](bool holds, const char* key) {
    TS_CHECK_CONFIG(holds, path, ": ", key, " is ",
                    json.contains(key) ? json[key].dump() : "absent",
                    ", which is not supported. Use adapters of plain LoRA.");
  };
  refuse(json.contains("peft_type") && json["peft_type"] == "LORA",
         "peft_type");
  // Others begin from weights that they change: the adapters fit those alone.
  const bool plain_start = says_nothing(json, "init_lora_weights") ||
                           json["init_lora_weights"].is_boolean() ||
                           json["init_lora_weights"] == "gaussian";
  refuse(plain_start, "init_lora_weights");
  refuse(says_nothing(json, "bias") || json["bias"] == "none", "bias");
  for (const auto& item : json.items()) {
    const bool is_harmless =
        std::ranges::find(kHarmless, item.key()) != std::end(kHarmless);
    refuse(is_harmless || says_nothing(json, item.key().c_str()),
           item.key().c_str());
  }
}

void check_peft_patterns(const Json& json, const SafetensorsFile& file,
                         const std::string& path) {
  const auto refuse = [&](bool holds, const char* key) {
    TS_CHECK_CONFIG(holds, path, ": ", key, " is ", json[key].dump(),
                    ", which is not supported but for layers that Tessera has "
                    "in parts, as tessera convert writes them. Use adapters of "
                    "one r and lora_alpha.");
  };
  for (const char* key : {"rank_pattern", "alpha_pattern"}) {
    if (says_nothing(json, key)) continue;
    refuse(json[key].is_object(), key);
    for (const auto& item : json[key].items()) {
      // To PEFT it is a regular expression.
      const bool is_name =
          item.key().find_first_of("\\^$*+?()[]{}|") == std::string::npos;
      refuse(is_name && item.value().is_number(), key);
    }
  }
  for (const std::string& layer : peft_layers(file)) {
    const Json* rank = pattern_of(json, "rank_pattern", layer);
    const Json* alpha = pattern_of(json, "alpha_pattern", layer);
    if (rank == nullptr && alpha == nullptr) continue;
    refuse(rank != nullptr, "alpha_pattern");
    refuse(alpha != nullptr && rank->is_number_integer() &&
               rank->get<int64_t>() == peft_rank(file, layer) &&
               is_near(alpha->get<double>() * json["r"].get<double>(),
                       json["lora_alpha"].get<double>() * rank->get<double>()),
           "rank_pattern");
  }
}

}  // namespace tessera::checkpoint::detail
