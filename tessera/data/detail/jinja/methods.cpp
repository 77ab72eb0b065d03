#include "tessera/data/detail/jinja/methods.h"

#include <algorithm>
#include <map>

#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/jinja/operators.h"
#include "tessera/data/detail/jinja/text.h"

namespace tessera::data::jinja {
namespace {

using Method = Value (*)(const Value& self, const Arguments& arguments);
using Methods = std::map<std::string, Method, std::less<>>;

// For who goes over all of it.
const std::string& text_in(const Value& self) {
  use_scan(std::ssize(self.text()->text));
  return self.text()->text;
}

Value list_of(const std::vector<std::string>& texts) {
  return std::vector<Value>(texts.begin(), texts.end());
}

template <Side kSide>
Value strip_method(const Value& self, const Arguments& arguments) {
  const Value set = bind("strip", arguments, {"chars"})[0];
  if (set.undefined() || set.is_none()) return strip(text_in(self), kSide);
  return strip(text_in(self), require_text(set, "strip"), kSide);
}

int64_t limit_of(const Value& value) {
  return value.undefined() ? -1 : value.as_integer();
}

const std::string& separator_of(const Value& value) {
  const std::string& separator = require_text(value, "split");
  if (separator.empty()) throw Failure("split: an empty separator");
  return separator;
}

Value split_method(const Value& self, const Arguments& arguments) {
  const auto values = bind("split", arguments, {"sep", "maxsplit"});
  const int64_t limit = limit_of(values[1]);
  if (values[0].undefined() || values[0].is_none()) {
    return list_of(split(text_in(self), limit));
  }
  return list_of(split(text_in(self), separator_of(values[0]), limit));
}

Value rsplit_method(const Value& self, const Arguments& arguments) {
  const auto values = bind("rsplit", arguments, {"sep", "maxsplit"});
  return list_of(
      split_right(text_in(self), separator_of(values[0]), limit_of(values[1])));
}

Value splitlines_method(const Value& self, const Arguments& arguments) {
  bind("splitlines", arguments, {});
  return list_of(split_lines(text_in(self)));
}

// startswith and endswith: of one text, or of any of a tuple.
template <typename Test>
Value any_affix(const Value& self, const Arguments& arguments, const char* name,
                const Test& test) {
  const Value affix = bind(name, arguments, {"affix"})[0];
  require_defined(affix);
  if (affix.text()) return test(text_in(self), affix.text()->text);
  const std::vector<Value> affixes = items_of(affix);
  return std::any_of(affixes.begin(), affixes.end(), [&](const Value& one) {
    return test(text_in(self), require_text(one, name));
  });
}

Value startswith_method(const Value& self, const Arguments& arguments) {
  return any_affix(self, arguments, "startswith",
                   [](const std::string& text, const std::string& affix) {
                     return text.starts_with(affix);
                   });
}

Value endswith_method(const Value& self, const Arguments& arguments) {
  return any_affix(self, arguments, "endswith",
                   [](const std::string& text, const std::string& affix) {
                     return text.ends_with(affix);
                   });
}

template <std::string (*kChange)(std::string_view)>
Value change_method(const Value& self, const Arguments& arguments) {
  bind("a method of text", arguments, {});
  return kChange(text_in(self));
}

Value replace_method(const Value& self, const Arguments& arguments) {
  const auto values = bind("replace", arguments, {"old", "new", "count"});
  return replace(text_in(self), require_text(values[0], "replace"),
                 require_text(values[1], "replace"), limit_of(values[2]));
}

// In code points; -1: nowhere.
template <bool kLast>
Value find_method_of_text(const Value& self, const Arguments& arguments) {
  const Value part = bind("find", arguments, {"sub"})[0];
  const std::string& text = text_in(self);
  const std::string& wanted = require_text(part, "find");
  const size_t at =
      kLast ? find_last_text(text, wanted) : find_text(text, wanted);
  if (at == std::string::npos) return -1;
  return length_of(std::string_view(text).substr(0, at));
}

Value count_in_text(const Value& self, const Arguments& arguments) {
  const Value part = bind("count", arguments, {"sub"})[0];
  const std::string& wanted = require_text(part, "count");
  if (wanted.empty()) return length_of(text_in(self)) + 1;
  return std::ssize(split(text_in(self), wanted)) - 1;
}

Value join_method(const Value& self, const Arguments& arguments) {
  const Value items = bind("join", arguments, {"iterable"})[0];
  require_defined(items);
  std::string text;
  bool first = true;
  for (const Value& item : items_of(items)) {
    const std::string& more = require_text(item, "join");
    const std::string& between = self.text()->text;
    use_bytes(std::ssize(between) + std::ssize(more));
    if (!first) text += between;
    text += more;
    first = false;
  }
  return text;
}

template <bool (*kTest)(uint32_t)>
Value all_method(const Value& self, const Arguments& arguments) {
  bind("a method of text", arguments, {});
  const std::vector<uint32_t> points = code_points(text_in(self));
  return !points.empty() && std::all_of(points.begin(), points.end(), kTest);
}

Value removeprefix_method(const Value& self, const Arguments& arguments) {
  const Value affix = bind("removeprefix", arguments, {"prefix"})[0];
  const std::string& prefix = require_text(affix, "removeprefix");
  const std::string& text = text_in(self);
  return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
}

Value removesuffix_method(const Value& self, const Arguments& arguments) {
  const Value affix = bind("removesuffix", arguments, {"suffix"})[0];
  const std::string& suffix = require_text(affix, "removesuffix");
  const std::string& text = text_in(self);
  if (!text.ends_with(suffix)) return text;
  return text.substr(0, text.size() - suffix.size());
}

template <bool kLast>
Value partition_method(const Value& self, const Arguments& arguments) {
  const Value given = bind("partition", arguments, {"sep"})[0];
  const std::string& separator = separator_of(given);
  const std::string& text = text_in(self);
  const size_t at =
      kLast ? find_last_text(text, separator) : find_text(text, separator);
  std::vector<Value> parts;
  if (at != std::string::npos) {
    parts = {text.substr(0, at), separator, text.substr(at + separator.size())};
  } else if (kLast) {
    parts = {"", "", text};
  } else {
    parts = {text, "", ""};
  }
  return {std::move(parts), /*tuple=*/true};
}

const Methods& text_methods() {
  static const Methods methods = {
      {"strip", strip_method<Side::kBoth>},
      {"lstrip", strip_method<Side::kLeft>},
      {"rstrip", strip_method<Side::kRight>},
      {"split", split_method},
      {"rsplit", rsplit_method},
      {"splitlines", splitlines_method},
      {"startswith", startswith_method},
      {"endswith", endswith_method},
      {"upper", change_method<upper>},
      {"lower", change_method<lower>},
      {"title", change_method<title>},
      {"capitalize", change_method<capitalize>},
      {"replace", replace_method},
      {"find", find_method_of_text<false>},
      {"rfind", find_method_of_text<true>},
      {"count", count_in_text},
      {"join", join_method},
      {"isdigit", all_method<is_digit>},
      {"isspace", all_method<is_space>},
      {"removeprefix", removeprefix_method},
      {"removesuffix", removesuffix_method},
      {"partition", partition_method<false>},
      {"rpartition", partition_method<true>},
  };
  return methods;
}

Value index_of_item(const Value& self, const Arguments& arguments) {
  const Value wanted = bind("index", arguments, {"value"})[0];
  const auto& items = self.sequence()->items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (equal(items[i], wanted)) return static_cast<int64_t>(i);
  }
  throw Failure(wanted.repr() + " is not in the list");
}

Value count_of_item(const Value& self, const Arguments& arguments) {
  const Value wanted = bind("count", arguments, {"value"})[0];
  const auto& items = self.sequence()->items;
  return std::count_if(items.begin(), items.end(),
                       [&](const Value& item) { return equal(item, wanted); });
}

const Methods& list_methods() {
  static const Methods methods = {
      {"index", index_of_item},
      {"count", count_of_item},
  };
  return methods;
}

Value get_method(const Value& self, const Arguments& arguments) {
  const auto values = bind("get", arguments, {"key", "default"});
  const Value* found = self.dict()->find(values[0]);
  if (found != nullptr) return *found;
  const bool given =
      arguments.positional.size() > 1 || !arguments.named.empty();
  return given ? values[1] : Value(None{});
}

Value items_method(const Value& self, const Arguments& arguments) {
  bind("items", arguments, {});
  std::vector<Value> items;
  for (const auto& [key, value] : self.dict()->items) {
    items.emplace_back(std::vector<Value>{key, value}, /*tuple=*/true);
  }
  return items;
}

Value keys_method(const Value& self, const Arguments& arguments) {
  bind("keys", arguments, {});
  return items_of(self);
}

Value values_method(const Value& self, const Arguments& arguments) {
  bind("values", arguments, {});
  std::vector<Value> values;
  for (const auto& item : self.dict()->items) values.push_back(item.second);
  return values;
}

Value copy_method(const Value& self, const Arguments& arguments) {
  bind("copy", arguments, {});
  return self;
}

const Methods& dict_methods() {
  static const Methods methods = {
      {"get", get_method},       {"items", items_method}, {"keys", keys_method},
      {"values", values_method}, {"copy", copy_method},
  };
  return methods;
}

Value cycle_method(const Value& self, const Arguments& arguments) {
  const auto& items = arguments.positional;
  if (items.empty()) throw Failure("loop.cycle takes at least one value");
  const Value* at = self.name_space()->attributes.named("index0");
  return items[at->as_integer() % std::ssize(items)];
}

const Methods& loop_methods() {
  static const Methods methods = {{"cycle", cycle_method}};
  return methods;
}

bool is_loop(const Value& value) {
  return value.name_space() && value.name_space()->is_loop;
}

}  // namespace

std::optional<Value> find_method(const Value& of, const std::string& name) {
  const Methods* methods = of.text()       ? &text_methods()
                           : of.sequence() ? &list_methods()
                           : of.dict()     ? &dict_methods()
                           : is_loop(of)   ? &loop_methods()
                                           : nullptr;
  if (methods == nullptr) return std::nullopt;
  const auto found = methods->find(name);
  if (found == methods->end()) return std::nullopt;
  return Callable{name, [of, method = found->second](const Arguments& given) {
                    return method(of, given);
                  }};
}

bool is_method(const std::string& name) {
  return text_methods().contains(name) || list_methods().contains(name) ||
         dict_methods().contains(name) || loop_methods().contains(name);
}

}  // namespace tessera::data::jinja
