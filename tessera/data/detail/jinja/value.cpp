#include "tessera/data/detail/jinja/value.h"

#include <c10/util/StringUtil.h>

#include <array>
#include <charconv>
#include <cmath>

#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/jinja/text.h"

namespace tessera::data::jinja {
namespace {

constexpr int kDeepest = 500;
constexpr int64_t kBytesOfText = 64;  // of one beside its bytes

// Python's order of text is that of code points, which UTF-8 keeps in bytes.
int order(const Value& a, const Value& b) {
  use_steps(1);
  if (a.is_number() && b.is_number()) {
    if (!a.floating() && !b.floating()) {
      const int64_t x = a.as_integer();
      const int64_t y = b.as_integer();
      return x < y ? -1 : static_cast<int>(x > y);
    }
    return a.as_double() < b.as_double()
               ? -1
               : static_cast<int>(a.as_double() > b.as_double());
  }
  if (a.text() && b.text()) {
    const int result = a.text()->text.compare(b.text()->text);
    return result < 0 ? -1 : static_cast<int>(result > 0);
  }
  if (a.sequence() && b.sequence()) {
    const auto& x = a.sequence()->items;
    const auto& y = b.sequence()->items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!equal(x[i], y[i])) return order(x[i], y[i]);
    }
    return x.size() < y.size() ? -1 : static_cast<int>(x.size() > y.size());
  }
  require_defined(a);
  require_defined(b);
  throw Failure(c10::str("'", a.type_name(), "' and '", b.type_name(),
                         "' have no order"));
}

bool equal_items(const std::vector<Value>& a, const std::vector<Value>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), equal);
}

bool equal_dicts(const Dict& a, const Dict& b) {
  if (a.items.size() != b.items.size()) return false;
  return std::all_of(a.items.begin(), a.items.end(), [&](const auto& item) {
    const Value* other = b.find(item.first);
    return other != nullptr && equal(item.second, *other);
  });
}

// What comes up from items within items is made anew for each.
void append(std::string& text, const std::string& more) {
  use_bytes(std::ssize(more));
  text += more;
}

std::string joined(const std::vector<Value>& items) {
  std::string text;
  for (const Value& item : items) {
    if (!text.empty()) text += ", ";
    append(text, item.repr());
  }
  return text;
}

std::string repr_of_dict(const Dict& dict) {
  std::string text;
  for (const auto& [key, value] : dict.items) {
    if (!text.empty()) text += ", ";
    append(text, key.repr() + ": " + value.repr());
  }
  return "{" + text + "}";
}

}  // namespace

Value::Value(const char* value) : Value(Text{value}) {}

Value::Value(std::string value) : Value(Text{std::move(value)}) {}

Value::Value(Text value) {
  use_bytes(std::ssize(value.text) + kBytesOfText);
  held_ = std::make_shared<const Text>(std::move(value));
}

Value::Value(std::vector<Value> items, bool tuple) {
  use_bytes(std::ssize(items) * static_cast<int64_t>(sizeof(Value)));
  int depth = 1;
  for (const Value& item : items) depth = depth_around(item, depth);
  held_ = std::make_shared<const Sequence>(
      Sequence{std::move(items), tuple, depth});
}

Value::Value(Dict dict) {
  use_bytes(std::ssize(dict.items) * int64_t{2 * sizeof(Value)});
  for (const auto& [key, value] : dict.items) {
    dict.depth = depth_around(key, depth_around(value, dict.depth));
  }
  held_ = std::make_shared<const Dict>(std::move(dict));
}

int Value::depth() const {
  if (sequence()) return sequence()->depth;
  if (dict()) return dict()->depth;
  // A rendering lets go of each of the others by itself.
  const bool holds = name_space() && name_space()->is_loop;
  return holds ? name_space()->attributes.depth : 0;
}

int depth_around(const Value& value, int so_far) {
  const int depth = value.depth() + 1;
  if (depth > kDeepest) {
    throw Failure(c10::str("lists or mappings lie more than ", kDeepest,
                           " deep in each other"));
  }
  return std::max(so_far, depth);
}

Value::Value(Callable callable)
    : held_(std::make_shared<const Callable>(std::move(callable))) {}

const Value* Dict::find(const Value& key) const {
  for (const auto& item : items) {
    if (equal(item.first, key)) return &item.second;
  }
  return nullptr;
}

const Value* Dict::named(std::string_view name) const {
  use_steps(1 + std::ssize(items) / 8);
  for (const auto& item : items) {
    const Text* text = item.first.text();
    if (text != nullptr && text->text == name) return &item.second;
  }
  return nullptr;
}

void Dict::set(const Value& key, Value value) {
  for (auto& item : items) {
    if (equal(item.first, key)) {
      item.second = std::move(value);
      return;
    }
  }
  items.emplace_back(key, std::move(value));
}

bool Value::truth() const {
  if (undefined() || is_none()) return false;
  if (is_number()) return as_double() != 0;
  if (text()) return !text()->text.empty();
  if (sequence()) return !sequence()->items.empty();
  if (dict()) return !dict()->items.empty();
  return true;
}

std::string Value::type_name() const {
  if (undefined()) return "Undefined";
  if (is_none()) return "NoneType";
  if (boolean()) return "bool";
  if (integer()) return "int";
  if (floating()) return "float";
  if (text()) return "str";
  if (sequence()) return sequence()->tuple ? "tuple" : "list";
  if (dict()) return "dict";
  return name_space() ? "namespace" : "function";
}

std::string Value::str() const {
  if (undefined()) return "";
  return text() ? text()->text : repr();
}

std::string Value::repr() const {
  if (undefined()) return "Undefined";
  if (is_none()) return "None";
  if (boolean()) return *boolean() ? "True" : "False";
  if (integer()) return std::to_string(*integer());
  if (floating()) return repr_of(*floating());
  if (text()) return repr_of_text(text()->text);
  if (dict()) return repr_of_dict(*dict());
  if (sequence()) {
    const auto& items = sequence()->items;
    if (!sequence()->tuple) return "[" + joined(items) + "]";
    return "(" + joined(items) + (items.size() == 1 ? ",)" : ")");
  }
  // Python would write an address.
  throw Failure("a " + type_name() + " has no text");
}

int64_t Value::as_integer() const {
  if (boolean()) return static_cast<int64_t>(*boolean());
  if (integer()) return *integer();
  require_defined(*this);
  throw Failure("'" + type_name() + "' is no whole number");
}

double Value::as_double() const {
  return floating() ? *floating() : static_cast<double>(as_integer());
}

bool equal(const Value& a, const Value& b) {
  use_steps(1);
  if (a.is_number() && b.is_number()) {
    if (!a.floating() && !b.floating()) return a.as_integer() == b.as_integer();
    return a.as_double() == b.as_double();
  }
  if (a.text() && b.text()) {
    const std::string& x = a.text()->text;
    const std::string& y = b.text()->text;
    if (x.size() != y.size()) return false;
    use_scan(std::ssize(x));
    return x == y;
  }
  if (a.sequence() && b.sequence()) {
    return a.sequence()->tuple == b.sequence()->tuple &&
           equal_items(a.sequence()->items, b.sequence()->items);
  }
  if (a.dict() && b.dict()) return equal_dicts(*a.dict(), *b.dict());
  if (a.name_space() || b.name_space()) return a.name_space() == b.name_space();
  if (a.callable() || b.callable()) return a.callable() == b.callable();
  return (a.is_none() && b.is_none()) || (a.undefined() && b.undefined());
}

bool less(const Value& a, const Value& b) { return order(a, b) < 0; }

void require_defined(const Value& value) {
  if (value.undefined() == nullptr) return;
  const std::string& what = value.undefined()->what;
  throw Failure(what.empty() ? "what is undefined is used" : what);
}

std::string soft_text(const Value& value) { return value.str(); }

const std::string& require_text(const Value& value, const std::string& use) {
  require_defined(value);
  if (value.text() == nullptr) {
    throw Failure(use + " takes text, not '" + value.type_name() + "'");
  }
  return value.text()->text;
}

std::vector<Value> bind(const std::string& function, const Arguments& arguments,
                        std::initializer_list<const char*> parameters) {
  std::vector<Value> values(parameters.size());
  if (arguments.positional.size() > parameters.size()) {
    throw Failure(c10::str(function, " takes at most ", parameters.size(),
                           " arguments, not ", arguments.positional.size()));
  }
  std::copy(arguments.positional.begin(), arguments.positional.end(),
            values.begin());
  for (const auto& [name, value] : arguments.named) {
    const auto* at = std::find(parameters.begin(), parameters.end(), name);
    if (at == parameters.end()) {
      throw Failure(function + " has no argument '" + name + "'");
    }
    values[at - parameters.begin()] = value;
  }
  return values;
}

// The fewest digits that read back the same, with an exponent below 1e-4 and
// from 1e16 on.
std::string repr_of(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  std::array<char, 40> buffer{};
  const auto write = [&](std::chars_format format) {
    const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(),
                                   number, format)
                         .ptr;
    return std::string(buffer.data(), end);
  };
  const double size = std::abs(number);
  if (size != 0 && (size < 1e-4 || size >= 1e16)) {
    return write(std::chars_format::scientific);
  }
  const std::string text = write(std::chars_format::fixed);
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

}  // namespace tessera::data::jinja
