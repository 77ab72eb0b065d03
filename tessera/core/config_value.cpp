// Values of the configuration: between JSON and C++, and what they may be.
#include <algorithm>
#include <array>
#include <cmath>

#include "tessera/core/detail/config_impl.h"
#include "tessera/core/error.h"

namespace tessera::config {
namespace {

using tessera::detail::in_quotes;
using tessera::detail::Json;

std::optional<bool> read(const Json& json, const bool*) {
  if (!json.is_boolean()) return std::nullopt;
  return json.get<bool>();
}

std::optional<int64_t> read(const Json& json, const int64_t*) {
  const bool fits =
      json.is_number_integer() &&
      (!json.is_number_unsigned() || json.get<uint64_t>() <= INT64_MAX);
  if (!fits) return std::nullopt;
  return json.get<int64_t>();
}

std::optional<double> read(const Json& json, const double*) {
  if (!json.is_number()) return std::nullopt;
  return json.get<double>();
}

std::optional<std::string> read(const Json& json, const std::string*) {
  if (!json.is_string()) return std::nullopt;
  return json.get<std::string>();
}

template <typename T>
std::optional<std::vector<T>> read(const Json& json, const std::vector<T>*) {
  std::vector<T> list;
  // A single string stands for a list of one.
  const bool single = std::is_same_v<T, std::string> && json.is_string();
  if (!json.is_array() && !single) return std::nullopt;
  for (const Json& item : single ? Json::array({json}) : json) {
    const auto value = read(item, static_cast<const T*>(nullptr));
    if (!value) return std::nullopt;
    list.push_back(*value);
  }
  return list;
}

// Objects are read key by key: config_resolve.cpp.
std::optional<Objects> read(const Json&, const Objects*) {
  return std::nullopt;
}

// 1 and not 1.0, which JSON would print.
std::string text_of(double bound) {
  const bool whole = std::abs(bound) < 1e15 && bound == std::floor(bound);
  return whole ? std::to_string(static_cast<int64_t>(bound))
               : Json(bound).dump();
}

std::string complaint_about_range(double number, const Key::Impl& key) {
  if (!std::isfinite(number)) return "it must be finite";
  if (key.minimum && number < *key.minimum) {
    return "it must be at least " + text_of(*key.minimum);
  }
  if (key.maximum && number > *key.maximum) {
    return "it must be at most " + text_of(*key.maximum);
  }
  if (key.bound && number <= *key.bound) {
    return "it must be more than " + text_of(*key.bound);
  }
  return "";
}

std::string complaint_about_word(const std::string& word,
                                 const Key::Impl& key) {
  if (word.find('\0') != std::string::npos) {
    return "it must not hold a zero byte";
  }
  if (key.choices.empty()) return "";
  if (std::count(key.choices.begin(), key.choices.end(), word) == 0) {
    const auto meant = nearest(word, key.choices);
    return "it is none of " + detail::joined(key.choices) +
           (meant ? ". Did you mean " + in_quotes(*meant) + "?" : "");
  }
  return "";
}

}  // namespace

std::string detail::joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

detail::Json detail::json_of(const Value& value) {
  if (const auto* objects = std::get_if<Objects>(&value)) {
    return Json::parse(objects->json);
  }
  return std::visit(
      [](const auto& held) {
        if constexpr (std::is_same_v<decltype(held), const Objects&>) {
          return Json();
        } else {
          return Json(held);
        }
      },
      value);
}

std::string detail::type_name(const Value& value) {
  constexpr std::array<const char*, 8> kNames = {"true or false",
                                                 "a whole number of 64 bits",
                                                 "a number",
                                                 "a string",
                                                 "a list of strings",
                                                 "a list of numbers",
                                                 "a list of whole numbers",
                                                 "a list of objects"};
  static_assert(kNames.size() == std::variant_size_v<Value>);
  return kNames[value.index()];
}

std::optional<Value> detail::value_of(const Json& json, const Key::Impl& key) {
  return std::visit(
      [&](const auto& held) -> std::optional<Value> {
        auto value = read(json, &held);
        if (!value) return std::nullopt;
        return Value(std::move(*value));
      },
      key.default_value);
}

std::string detail::complaint_about(const Value& value, const Key::Impl& key) {
  std::string complaint;
  const auto add = [&](const std::string& found) {
    if (complaint.empty()) complaint = found;
  };
  if (const auto* whole = std::get_if<int64_t>(&value)) {
    add(complaint_about_range(static_cast<double>(*whole), key));
  } else if (const auto* number = std::get_if<double>(&value)) {
    add(complaint_about_range(*number, key));
  } else if (const auto* word = std::get_if<std::string>(&value)) {
    add(complaint_about_word(*word, key));
  } else if (const auto* words =
                 std::get_if<std::vector<std::string>>(&value)) {
    for (const auto& each : *words) add(complaint_about_word(each, key));
  }
  for (const auto& check : key.checks) {
    if (complaint.empty()) add(check(value));
  }
  return complaint;
}

}  // namespace tessera::config
