#include "tessera/monitor/detail/json_text.h"

#include <charconv>
#include <cmath>

#include "tessera/core/detail/json.h"

namespace tessera::monitor::detail {

std::string shortest(double value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return {text, end};
}

JsonText& JsonText::objects(const char* name,
                            const std::vector<JsonText>& values) {
  std::string list;
  for (const JsonText& value : values) {
    list += (list.empty() ? "" : ", ") + value.str();
  }
  return raw(name, "[" + list + "]");
}

JsonText& JsonText::object(const char* name, const JsonText& value) {
  return raw(name, value.str());
}

JsonText& JsonText::raw(const char* name, const std::string& value) {
  if (!fields_.empty()) fields_ += ",";
  fields_.append(1, '"').append(name).append("\":").append(value);
  return *this;
}

JsonText& JsonText::number(const char* name, double value) {
  return raw(name, shortest(value));
}

JsonText& JsonText::number(const char* name, int64_t value) {
  return raw(name, std::to_string(value));
}

JsonText& JsonText::number(const char* name,
                           const std::optional<double>& value) {
  return raw(name, value ? shortest(*value) : "null");
}

JsonText& JsonText::numbers(const char* name,
                            const std::vector<double>& values) {
  std::string list;
  for (double value : values)
    list += (list.empty() ? "" : ",") + shortest(value);
  return raw(name, "[" + list + "]");
}

JsonText& JsonText::text(const char* name, const std::string& value) {
  using tessera::detail::Json;
  return raw(name,
             Json(value).dump(-1, ' ', true, Json::error_handler_t::replace));
}

}  // namespace tessera::monitor::detail
