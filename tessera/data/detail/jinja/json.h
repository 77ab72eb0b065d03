// JSON to values and back: what a chat says, and the filter tojson.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/data/detail/jinja/value.h"

namespace tessera::data::jinja {

// Keys stay in their order. Failure on what is no JSON.
Value parse_json(std::string_view text);

struct JsonStyle {
  std::optional<std::string> indent = {};  // none: on one line
  std::string comma = ", ";
  std::string colon = ": ";
  bool ascii = false;
  bool sort_keys = false;
};

// As Python's json.dumps.
std::string to_json(const Value& value, const JsonStyle& style = {});
// The filter, with its arguments; the first one is the value.
Value tojson_filter(const Arguments& arguments);

}  // namespace tessera::data::jinja
