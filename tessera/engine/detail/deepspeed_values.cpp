#include "tessera/engine/detail/deepspeed_values.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "tessera/core/config.h"
#include "tessera/core/units.h"

namespace tessera::engine::detail {
namespace {

using tessera::detail::in_one_line;
using tessera::detail::in_quotes;
using Effect = DeepSpeedEffect;
using Type = DeepSpeedType;

const char* name_of(Type type) {
  switch (type) {
    case Type::kFlag:
      return "true or false";
    case Type::kWhole:
      return "a whole number of 64 bits";
    case Type::kNumber:
      return "a number";
    case Type::kWord:
      return "a string";
    case Type::kNumbers:
      return "a list of numbers";
    case Type::kObject:
      return "an object";
  }
  return "";
}

// 2e8 is one, and 2.5 is none.
std::optional<Json> as_whole(const Json& json) {
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (json.is_number_float()) {
    const double number = json.get<double>();
    if (number != std::floor(number) || std::abs(number) > kExact) return {};
    return Json(static_cast<int64_t>(number));
  }
  const bool fits =
      json.is_number_integer() &&
      (!json.is_number_unsigned() || json.get<uint64_t>() <= INT64_MAX);
  return fits ? std::optional(Json(json.get<int64_t>())) : std::nullopt;
}

std::optional<Json> of_type(Type type, const Json& json) {
  const auto if_so = [&](bool fits) {
    return fits ? std::optional(json) : std::nullopt;
  };
  switch (type) {
    case Type::kFlag:
      return if_so(json.is_boolean());
    case Type::kWhole:
      return as_whole(json);
    case Type::kNumber:
      return if_so(json.is_number());
    case Type::kWord:
      return if_so(json.is_string());
    case Type::kNumbers:
      return if_so(json.is_array() &&
                   std::ranges::all_of(json, [](const Json& item) {
                     return item.is_number();
                   }));
    case Type::kObject:
      return if_so(json.is_object());
  }
  return std::nullopt;
}

bool is_section(const std::string& name) {
  return std::ranges::any_of(deepspeed_keys(), [&](const DeepSpeedKey& key) {
    return key.name.starts_with(name + ".");
  });
}

bool is_off(const Json& section) {
  return section.empty() ||
         (section.contains("enabled") && section["enabled"] == false);
}

std::string lower(std::string word) {
  std::ranges::transform(word, word.begin(), [](unsigned char letter) {
    return static_cast<char>(std::tolower(letter));
  });
  return word;
}

std::string last_part(const std::string& dotted) {
  return dotted.substr(dotted.rfind('.') + 1);
}

// What may stand beside a key: names of keys and sections below `prefix`.
std::vector<std::string> names_below(const std::string& prefix) {
  std::vector<std::string> names;
  for (const auto& key : deepspeed_keys()) {
    if (!key.name.starts_with(prefix)) continue;
    const auto name = key.name.substr(0, key.name.find('.', prefix.size()));
    if (std::ranges::count(names, name) == 0) names.push_back(name);
  }
  return names;
}

}  // namespace

// From text to values.
class DeepSpeedValues::Reader {
 public:
  Reader(const std::string& text, DeepSpeedValues& values)
      : text_(text), values_(values) {}

  void read() {
    const Json root = tessera::detail::parse_json(
        text_, values_.source_,
        {.max_bytes = tessera::detail::kMaxConfigBytes,
         .comments = true,
         .exit_code = ExitCode::kConfig});
    TS_CHECK_CONFIG(root.is_object(), place(root),
                    ": expected an object, as {\"train_batch_size\": 32}.");
    read_object(root, "");
  }

 private:
  std::string place(const Json& value) const {
    return tessera::detail::place_of(value, text_, values_.source_);
  }

  // Sections are as deep as the names of keys, so this recursion is too.
  void read_object(const Json& object, const std::string& prefix) {
    for (const auto& item : object.items()) {
      const std::string name = prefix + item.key();
      const bool dotted = item.key().find('.') != std::string::npos;
      const DeepSpeedKey* key = dotted ? nullptr : deepspeed_key(name);
      if (key != nullptr) {
        read_value(*key, item.value());
      } else if (!dotted && is_section(name)) {
        if (item.value().is_null()) continue;
        TS_CHECK_CONFIG(item.value().is_object(), place(item.value()), ": ",
                        name, ": expected an object, got ",
                        in_one_line(item.value()), ".");
        read_object(item.value(), name + ".");
      } else {
        refuse_unknown(name, names_below(prefix), item.value());
      }
    }
  }

  [[noreturn]] void refuse_unknown(const std::string& name,
                                   const std::vector<std::string>& siblings,
                                   const Json& value) const {
    auto meant = config::nearest(name, siblings);
    for (const auto& sibling : siblings) {
      const auto close = config::nearest(last_part(name), {last_part(sibling)});
      if (!meant && close) meant = sibling;
    }
    for (const auto& key : deepspeed_keys()) {
      if (!meant && last_part(key.name) == last_part(name)) meant = key.name;
    }
    TS_CHECK_CONFIG(
        false, tessera::detail::place_of_key(value, text_, values_.source_),
        ": unknown key ", in_quotes(name), ".",
        meant ? " Did you mean " + in_quotes(*meant) + "?"
              : " 'tessera schema --deepspeed' lists those that are known.");
    std::abort();  // not reached
  }

  void read_value(const DeepSpeedKey& key, const Json& json) {
    if (json.is_null()) return;
    if (json == "auto") {
      values_.autos_.push_back(key.name);
      return;
    }
    const std::string origin = place(json) + ": " + key.name;
    const auto value = of_type(key.type, json);
    TS_CHECK_CONFIG(value, origin, ": expected ", name_of(key.type),
                    key.type == Type::kObject ? "" : ", or \"auto\"", ", got ",
                    in_one_line(json), ".");
    check(key, *value, origin);
    values_.values_.push_back({&key, *value, origin});
  }

  void check(const DeepSpeedKey& key, const Json& value,
             const std::string& origin) {
    if (key.type == Type::kWord && !key.choices.empty()) {
      const auto word = value.get<std::string>();
      TS_CHECK_CONFIG(!choice_of(word, key.choices).empty(), origin, " is ",
                      in_quotes(word), ", which is none of ",
                      some_of(words_in(key.choices), 16), ": ", key.refusal,
                      ".");
    }
    if (key.effect == Effect::kOnly) {
      TS_CHECK_CONFIG(value == Json::parse(key.value), origin, " is ",
                      in_one_line(value), ", not ", key.value, ": ",
                      key.refusal, ".");
    }
    if (key.effect == Effect::kRefusedSection) {
      TS_CHECK_CONFIG(is_off(value), origin, " is enabled: ", key.refusal,
                      ". Leave the section out, or set its \"enabled\" to "
                      "false.");
    }
    if (key.effect == Effect::kIdleSection && !key.inside.empty()) {
      for (const auto& item : value.items()) {
        std::vector<std::string> siblings;
        for (const auto& word : words_in(key.inside)) {
          siblings.push_back(key.name + "." + word);
        }
        const std::string name = key.name + "." + item.key();
        if (std::ranges::count(siblings, name) == 0) {
          refuse_unknown(name, siblings, item.value());
        }
      }
    }
  }

  const std::string& text_;
  DeepSpeedValues& values_;
};

DeepSpeedValues::DeepSpeedValues(const std::string& text,
                                 const std::string& source)
    : source_(source) {
  Reader(text, *this).read();
  leave_out_disabled();
  find_without_effect();
}

// Of a section that has a key "enabled", the others count where that is true;
// of fp16 with "auto" too, if the run then computes in it.
void DeepSpeedValues::leave_out_disabled() {
  std::vector<DeepSpeedValue> kept;
  for (const auto& value : values_) {
    const std::string& name = value.key->name;
    const size_t dot = name.rfind('.');
    const std::string gate =
        dot == name.npos ? "" : name.substr(0, dot) + ".enabled";
    const bool is_gated =
        !gate.empty() && name != gate && deepspeed_key(gate) != nullptr;
    const bool runs_choice = gate == "fp16.enabled" && is_auto(gate);
    if (!is_gated || is_true(gate) || runs_choice) {
      kept.push_back(value);
    } else if (is_open(gate)) {
      without_effect_.emplace_back(name, gate + " is not true");
    }
  }
  values_ = std::move(kept);
}

void DeepSpeedValues::find_without_effect() {
  for (const auto& value : values_) {
    const DeepSpeedKey& key = *value.key;
    const bool idle =
        key.effect == Effect::kIdle ||
        (key.effect == Effect::kSame &&
         value.value != Json::parse(key.value)) ||
        (key.effect == Effect::kIdleSection && !is_off(value.value));
    if (idle) without_effect_.emplace_back(key.name, std::string(key.why));
  }
}

const DeepSpeedValue* DeepSpeedValues::find(const std::string& name) const {
  const auto found = std::ranges::find_if(
      values_, [&](const auto& value) { return value.key->name == name; });
  return found == values_.end() ? nullptr : &*found;
}

bool DeepSpeedValues::is_true(const std::string& name) const {
  const DeepSpeedValue* found = find(name);
  return found != nullptr && found->value == true;
}

double DeepSpeedValues::number_or(const std::string& name,
                                  double otherwise) const {
  const DeepSpeedValue* found = find(name);
  return found == nullptr ? otherwise : found->value.get<double>();
}

bool DeepSpeedValues::is_auto(const std::string& name) const {
  return std::ranges::count(autos_, name) > 0;
}

bool DeepSpeedValues::has_section(const std::string& name) const {
  const auto lies_in = [&](const std::string& key) {
    return key.starts_with(name + ".");
  };
  return std::ranges::any_of(autos_, lies_in) ||
         std::ranges::any_of(values_, [&](const DeepSpeedValue& value) {
           return lies_in(value.key->name);
         });
}

std::string choice_of(const std::string& word, std::string_view choices) {
  for (const auto& choice : words_in(choices)) {
    if (lower(choice) == lower(word)) return choice;
  }
  return "";
}

}  // namespace tessera::engine::detail
