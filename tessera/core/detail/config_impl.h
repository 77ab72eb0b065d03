// What stands behind config::Key and config::Section.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/core/detail/json.h"

namespace tessera::config {

struct Key::Impl {
  std::string name;
  std::string meaning;
  Value default_value;  // its type is the key's
  std::function<Value()> get;
  std::function<void(const Value&)> set;
  std::shared_ptr<Section::ObjectList> objects;  // of a list of objects

  std::optional<double> minimum, maximum, bound;  // bound: values lie above
  std::vector<std::string> choices;
  std::vector<std::function<std::string(const Value&)>> checks;
};

struct NamedSection {
  std::string name;
  std::string meaning;
  std::shared_ptr<Section> section;
};

struct Section::Impl {
  // Keys and sections, in the order of their declaration.
  std::vector<std::variant<std::shared_ptr<Key::Impl>, NamedSection>> items;
};

namespace detail {

using tessera::detail::Json;

// Calls on_key(dotted name, Key::Impl&) for every key in `section`, below too.
void for_each_key(
    const Section& section, const std::string& prefix,
    const std::function<void(const std::string&, Key::Impl&)>& on_key);

// "a, b, c".
std::string joined(const std::vector<std::string>& words);

Json json_of(const Value& value);
// Of all keys in `section`, below too.
Json values_of(const Section& section);
// "a whole number", "true or false" ...
std::string type_name(const Value& value);
// The value of the key's type that `json` holds; nothing where it has another.
std::optional<Value> value_of(const Json& json, const Key::Impl& key);
// Why `value` is refused, or "".
std::string complaint_about(const Value& value, const Key::Impl& key);

}  // namespace detail
}  // namespace tessera::config
