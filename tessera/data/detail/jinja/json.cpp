#include "tessera/data/detail/jinja/json.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>

#include "tessera/core/detail/json.h"
#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/jinja/text.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data::jinja {
namespace {

using tessera::detail::Json;

Value value_of(const Json& json) {
  switch (json.type()) {
    case Json::value_t::boolean:
      return json.get<bool>();
    case Json::value_t::number_integer:
      return json.get<int64_t>();
    case Json::value_t::number_unsigned: {
      const auto number = json.get<uint64_t>();
      if (number > static_cast<uint64_t>(INT64_MAX)) {
        throw Failure(c10::str("the number ", number, " is beyond 64 bits"));
      }
      return static_cast<int64_t>(number);
    }
    case Json::value_t::number_float:
      return json.get<double>();
    case Json::value_t::string:
      return json.get<std::string>();
    case Json::value_t::array: {
      std::vector<Value> items;
      for (const Json& item : json) items.push_back(value_of(item));
      return items;
    }
    case Json::value_t::object: {
      Dict dict;
      for (const auto& [key, item] : json.items()) {
        dict.items.emplace_back(key, value_of(item));
      }
      return dict;
    }
    default:
      return None{};
  }
}

std::string escape_unit(uint32_t unit) { return "\\u" + hexadecimal(unit, 4); }

std::string json_text(std::string_view text, bool ascii) {
  std::string result = "\"";
  for (const uint32_t point : code_points(text)) {
    constexpr std::string_view kPlain = "\"\\\n\r\t\f\b";
    constexpr std::string_view kNames = "\"\\nrtfb";
    const size_t named =
        point < 0x80 ? kPlain.find(static_cast<char>(point)) : kPlain.npos;
    if (named != kPlain.npos) {
      result += '\\';
      result += kNames[named];
    } else if (point < 0x20 || (ascii && point > 0x7e && point < 0x10000)) {
      result += escape_unit(point);
    } else if (ascii && point >= 0x10000) {
      result += escape_unit(0xd800 + ((point - 0x10000) >> 10));
      result += escape_unit(0xdc00 + ((point - 0x10000) & 0x3ff));
    } else {
      detail::append_code_point(result, point);
    }
  }
  return result + '"';
}

std::string json_number(double number) {
  if (std::isnan(number)) return "NaN";
  if (std::isinf(number)) return number < 0 ? "-Infinity" : "Infinity";
  return repr_of(number);
}

class Writer {
 public:
  explicit Writer(const JsonStyle& style) : style_(style) {}

  void write(const Value& value) {
    use_steps(1);
    use_bytes(static_cast<int64_t>(out_.size() -
                                   std::exchange(counted_, out_.size())));
    if (value.text()) {
      out_ += json_text(value.text()->text, style_.ascii);
    } else if (value.is_none()) {
      out_ += "null";
    } else if (value.boolean()) {
      out_ += *value.boolean() ? "true" : "false";
    } else if (value.integer()) {
      out_ += std::to_string(*value.integer());
    } else if (value.floating()) {
      out_ += json_number(*value.floating());
    } else if (value.sequence()) {
      write_list(value.sequence()->items);
    } else if (value.dict()) {
      write_dict(*value.dict());
    } else {
      require_defined(value);
      throw Failure("'" + value.type_name() + "' is not JSON");
    }
  }

  std::string take() { return std::move(out_); }

 private:
  void line(int64_t depth) {
    if (!style_.indent) return;
    use_bytes(std::ssize(*style_.indent) * depth);
    out_ += '\n';
    for (int64_t i = 0; i < depth; ++i) out_ += *style_.indent;
  }

  void write_list(const std::vector<Value>& items) {
    out_ += '[';
    ++depth_;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_ += style_.comma;
      line(depth_);
      write(items[i]);
    }
    --depth_;
    if (!items.empty()) line(depth_);
    out_ += ']';
  }

  void write_dict(const Dict& dict) {
    auto items = dict.items;
    if (style_.sort_keys) {
      std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
        return less(a.first, b.first);
      });
    }
    out_ += '{';
    ++depth_;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_ += style_.comma;
      line(depth_);
      const Value& key = items[i].first;
      // A key that is no text is written as the text of its JSON.
      out_ += key.text() ? json_text(key.text()->text, style_.ascii)
                         : '"' + to_json(key) + '"';
      out_ += style_.colon;
      write(items[i].second);
    }
    --depth_;
    if (!items.empty()) line(depth_);
    out_ += '}';
  }

  JsonStyle style_;
  int64_t depth_ = 0;
  std::string out_;
  size_t counted_ = 0;  // of its bytes
};

}  // namespace

Value parse_json(std::string_view text) {
  try {
    return value_of(Json::parse(text));
  } catch (const Json::exception& error) {
    throw Failure(error.what());
  }
}

std::string to_json(const Value& value, const JsonStyle& style) {
  Writer writer(style);
  writer.write(value);
  return writer.take();
}

Value tojson_filter(const Arguments& arguments) {
  const auto values =
      bind("the filter tojson", arguments,
           {"value", "ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii = values[1].truth();
  if (values[2].integer() || values[2].boolean()) {
    style.indent =
        std::string(std::clamp<int64_t>(values[2].as_integer(), 0, 64), ' ');
  } else if (values[2].text()) {
    style.indent = values[2].text()->text;
  }
  if (style.indent) style.comma = ",";
  if (values[3].sequence()) {
    const auto& pair = values[3].sequence()->items;
    if (pair.size() != 2) throw Failure("tojson takes two separators");
    style.comma = require_text(pair[0], "a separator of tojson");
    style.colon = require_text(pair[1], "a separator of tojson");
  }
  style.sort_keys = values[4].truth();
  return to_json(values[0], style);
}

}  // namespace tessera::data::jinja
