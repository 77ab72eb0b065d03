#include "tessera/data/detail/jinja/filters.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/jinja/json.h"
#include "tessera/data/detail/jinja/methods.h"
#include "tessera/data/detail/jinja/numbers.h"
#include "tessera/data/detail/jinja/operators.h"
#include "tessera/data/detail/jinja/text.h"

namespace tessera::data::jinja {
namespace {

Value call_method(const Value& value, const std::string& name,
                  const Arguments& arguments = {}) {
  return find_method(soft_text(value), name)->callable()->call(arguments);
}

// "a.b.0": what map, selectattr and others take of an item.
Value by_path(Value value, const Value& path) {
  if (path.integer()) return element(value, path);
  for (const std::string& part : split(require_text(path, "attribute"), ".")) {
    const bool is_number =
        !part.empty() && std::all_of(part.begin(), part.end(), [](char c) {
          return c >= '0' && c <= '9';
        });
    value = element(value,
                    is_number ? Value(int64_t{std::stoll(part)}) : Value(part));
  }
  return value;
}

// What values are compared by: letters without their case, unless told.
Value sort_key(const Value& item, const Value& path, bool case_sensitive) {
  const bool has_path = !path.undefined() && !path.is_none();
  const Value key = has_path ? by_path(item, path) : item;
  if (key.text() && !case_sensitive) return lower(key.text()->text);
  return key;
}

Value trim(const Arguments& given) {
  const auto values = bind("the filter trim", given, {"value", "chars"});
  Arguments chars;
  if (!values[1].undefined()) chars.positional.push_back(values[1]);
  return call_method(values[0], "strip", chars);
}

Value default_filter(const Arguments& given) {
  const auto values =
      bind("the filter default", given, {"value", "default_value", "boolean"});
  const bool missing =
      values[0].undefined() || (values[2].truth() && !values[0].truth());
  if (!missing) return values[0];
  const bool has_other = given.positional.size() > 1 || !given.named.empty();
  return has_other ? values[1] : Value("");
}

Value join(const Arguments& given) {
  const auto values =
      bind("the filter join", given, {"value", "d", "attribute"});
  const std::string between = soft_text(values[1]);
  std::string text;
  bool first = true;
  for (Value item : items_of(values[0])) {
    if (!values[2].undefined()) item = by_path(item, values[2]);
    const std::string more = soft_text(item);
    use_bytes(std::ssize(between) + std::ssize(more));
    if (!first) text += between;
    text += more;
    first = false;
  }
  return text;
}

template <bool kLast>
Value end_of(const Arguments& given) {
  const Value value = bind("the filter first or last", given, {"value"})[0];
  const std::vector<Value> items = items_of(value);
  if (items.empty()) return Undefined{"an empty list has no first or last"};
  return kLast ? items.back() : items.front();
}

Value reverse(const Arguments& given) {
  const Value value = bind("the filter reverse", given, {"value"})[0];
  if (value.text()) return slice(value, None{}, None{}, -1);
  std::vector<Value> items = items_of(value);
  std::reverse(items.begin(), items.end());
  return items;
}

Value items_filter(const Arguments& given) {
  const Value value = bind("the filter items", given, {"value"})[0];
  if (value.undefined()) return std::vector<Value>{};
  if (!value.dict()) throw Failure("the filter items takes a mapping");
  return find_method(value, "items")->callable()->call({});
}

Value replace_filter(const Arguments& given) {
  const auto values =
      bind("the filter replace", given, {"s", "old", "new", "count"});
  const bool all = values[3].undefined() || values[3].is_none();
  return replace(soft_text(values[0]), soft_text(values[1]),
                 soft_text(values[2]), all ? -1 : values[3].as_integer());
}

Value indent(const Arguments& given) {
  const auto values =
      bind("the filter indent", given, {"s", "width", "first", "blank"});
  std::string space(4, ' ');
  if (values[1].text()) {
    space = values[1].text()->text;
  } else if (!values[1].undefined()) {
    space =
        std::string(std::clamp<int64_t>(values[1].as_integer(), 0, 256), ' ');
  }
  const std::vector<std::string> lines =
      split_lines(soft_text(values[0]) + "\n");
  std::string text;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) text += "\n";
    const bool moved =
        i == 0 ? values[2].truth() : values[3].truth() || !lines[i].empty();
    use_bytes(std::ssize(space) + std::ssize(lines[i]));
    text += (moved ? space : "") + lines[i];
  }
  return text;
}

Value to_int(const Arguments& given) {
  const auto values = bind("the filter int", given, {"value", "default"});
  const Value otherwise = values[1].undefined() ? Value(0) : values[1];
  if (values[0].floating()) {
    const double number = *values[0].floating();
    return std::abs(number) < 9e18 ? Value(static_cast<int64_t>(number))
                                   : otherwise;
  }
  if (values[0].is_number()) return values[0].as_integer();
  if (!values[0].text()) return otherwise;
  const std::string& text = values[0].text()->text;
  if (const auto whole = whole_number_in(text)) return *whole;
  const auto real = number_in(text);
  return real && std::abs(*real) < 9e18 ? Value(static_cast<int64_t>(*real))
                                        : otherwise;
}

Value to_float(const Arguments& given) {
  const auto values = bind("the filter float", given, {"value", "default"});
  if (values[0].is_number()) return values[0].as_double();
  if (values[0].text()) {
    if (const auto real = number_in(values[0].text()->text)) {
      return *real;
    }
  }
  return values[1].undefined() ? Value(0.0) : values[1];
}

Value round_filter(const Arguments& given) {
  const auto values =
      bind("the filter round", given, {"value", "precision", "method"});
  const int64_t digits = values[1].undefined() ? 0 : values[1].as_integer();
  const std::string method =
      values[2].undefined() ? "common" : soft_text(values[2]);
  if (method == "common") return rounded(values[0], digits);
  const double scale = std::pow(10.0, static_cast<double>(digits));
  const double scaled = values[0].as_double() * scale;
  if (method == "ceil") return std::ceil(scaled) / scale;
  if (method == "floor") return std::floor(scaled) / scale;
  throw Failure("the filter round has no method '" + method + "'");
}

Value sort_filter(const Arguments& given) {
  const auto values = bind("the filter sort", given,
                           {"value", "reverse", "case_sensitive", "attribute"});
  std::vector<Value> items = items_of(values[0]);
  const bool cased = values[2].truth();
  const bool falls = values[1].truth();
  std::stable_sort(items.begin(), items.end(),
                   [&](const Value& a, const Value& b) {
                     const Value x = sort_key(a, values[3], cased);
                     const Value y = sort_key(b, values[3], cased);
                     return falls ? less(y, x) : less(x, y);
                   });
  return items;
}

Value dictsort(const Arguments& given) {
  const auto values = bind("the filter dictsort", given,
                           {"value", "case_sensitive", "by", "reverse"});
  if (!values[0].dict()) throw Failure("the filter dictsort takes a mapping");
  const bool by_value = soft_text(values[2]) == "value";
  const Value items = find_method(values[0], "items")->callable()->call({});
  Arguments sorted{
      {items, values[3].truth(), values[1].truth(), Value(by_value ? 1 : 0)}};
  return sort_filter(sorted);
}

Value unique(const Arguments& given) {
  const auto values = bind("the filter unique", given,
                           {"value", "case_sensitive", "attribute"});
  std::vector<Value> items;
  std::vector<Value> seen;
  for (const Value& item : items_of(values[0])) {
    const Value key = sort_key(item, values[2], values[1].truth());
    const auto is_key = [&](const Value& one) { return equal(one, key); };
    if (std::ranges::any_of(seen, is_key)) continue;
    seen.push_back(key);
    items.push_back(item);
  }
  return items;
}

template <bool kMost>
Value extreme(const Arguments& given) {
  const auto values = bind("the filter min or max", given,
                           {"value", "case_sensitive", "attribute"});
  const std::vector<Value> items = items_of(values[0]);
  if (items.empty()) return Undefined{"an empty list has no min or max"};
  const auto below = [&](const Value& a, const Value& b) {
    const Value x = sort_key(a, values[2], values[1].truth());
    const Value y = sort_key(b, values[2], values[1].truth());
    return kMost ? less(y, x) : less(x, y);
  };
  return *std::min_element(items.begin(), items.end(), below);
}

Value sum(const Arguments& given) {
  const auto values =
      bind("the filter sum", given, {"value", "attribute", "start"});
  Value total = values[2].undefined() ? Value(0) : values[2];
  const bool has_path = !values[1].undefined() && !values[1].is_none();
  for (const Value& item : items_of(values[0])) {
    total = add(total, has_path ? by_path(item, values[1]) : item);
  }
  return total;
}

// The filter or test that an argument names, with its own arguments behind.
template <typename Found>
Found named_by(const Value& name, Found (*find)(const std::string&),
               const char* kind) {
  const std::string& text = require_text(name, kind);
  const Found found = find(text);
  if (found == nullptr)
    throw Failure(std::string(kind) + " '" + text + "' is not supported");
  return found;
}

Arguments behind(const Arguments& given, size_t count) {
  Arguments rest = given;
  const size_t cut = std::min(count, rest.positional.size());
  rest.positional.erase(rest.positional.begin(),
                        rest.positional.begin() + static_cast<int64_t>(cut));
  return rest;
}

Value map_filter(const Arguments& given) {
  if (given.positional.empty()) throw Failure("map filters a list");
  std::vector<Value> items;
  if (given.positional.size() == 1) {  // map(attribute=..., default=...)
    const auto values =
        bind("the filter map", given, {"value", "attribute", "default"});
    for (const Value& item : items_of(values[0])) {
      Value found = by_path(item, values[1]);
      if (found.undefined() && !values[2].undefined()) found = values[2];
      items.push_back(std::move(found));
    }
    return items;
  }
  const Filter filter =
      named_by(given.positional[1], find_filter, "the filter");
  for (const Value& item : items_of(given.positional[0])) {
    Arguments arguments = behind(given, 2);
    arguments.positional.insert(arguments.positional.begin(), item);
    items.push_back(filter(arguments));
  }
  return items;
}

// select, reject, selectattr, rejectattr.
template <bool kKeep, bool kByAttribute>
Value choose(const Arguments& given) {
  constexpr size_t kTest = kByAttribute ? 2 : 1;
  if (given.positional.size() < kTest) {
    throw Failure("this filter needs an attribute");
  }
  const bool has_test = given.positional.size() > kTest;
  const Test test =
      has_test ? named_by(given.positional[kTest], find_test, "the test")
               : nullptr;
  const Arguments others = behind(given, kTest + 1);
  std::vector<Value> items;
  for (const Value& item : items_of(given.positional[0])) {
    const Value tested =
        kByAttribute ? by_path(item, given.positional[1]) : item;
    const bool holds = test ? test(tested, others) : tested.truth();
    if (holds == kKeep) items.push_back(item);
  }
  return items;
}

template <std::string (*kChange)(std::string_view)>
Value change(const Arguments& given) {
  return kChange(soft_text(bind("this filter", given, {"value"})[0]));
}

Value escape(const Arguments& given) {
  const Value value = bind("the filter escape", given, {"value"})[0];
  if (value.text() && value.text()->markup) return value;
  return Text{escape_html(soft_text(value)), /*markup=*/true};
}

Value wordcount(const Arguments& given) {
  const Value value = bind("the filter wordcount", given, {"value"})[0];
  return count_words(soft_text(value));
}

Value title_filter(const Arguments& given) {
  return title_of_words(
      soft_text(bind("the filter title", given, {"value"})[0]));
}

Value abs_filter(const Arguments& given) {
  const Value value = bind("the filter abs", given, {"value"})[0];
  return less(value, 0) ? negate(value) : value;
}

const auto& filters() {
  static const std::map<std::string, Filter, std::less<>> all = {
      {"abs", abs_filter},
      {"capitalize", change<capitalize>},
      {"count",
       [](const Arguments& a) -> Value {
         return length(bind("count", a, {"value"})[0]);
       }},
      {"d", default_filter},
      {"default", default_filter},
      {"dictsort", dictsort},
      {"e", escape},
      {"escape", escape},
      {"first", end_of<false>},
      {"float", to_float},
      {"indent", indent},
      {"int", to_int},
      {"items", items_filter},
      {"join", join},
      {"last", end_of<true>},
      {"length",
       [](const Arguments& a) -> Value {
         return length(bind("length", a, {"value"})[0]);
       }},
      {"list",
       [](const Arguments& a) -> Value {
         return items_of(bind("list", a, {"value"})[0]);
       }},
      {"lower", change<lower>},
      {"map", map_filter},
      {"max", extreme<true>},
      {"min", extreme<false>},
      {"reject", choose<false, false>},
      {"rejectattr", choose<false, true>},
      {"replace", replace_filter},
      {"reverse", reverse},
      {"round", round_filter},
      {"safe",
       [](const Arguments& a) -> Value {
         return Text{soft_text(bind("safe", a, {"value"})[0]), true};
       }},
      {"select", choose<true, false>},
      {"selectattr", choose<true, true>},
      {"sort", sort_filter},
      {"string",
       [](const Arguments& a) -> Value {
         return soft_text(bind("string", a, {"value"})[0]);
       }},
      {"sum", sum},
      {"title", title_filter},
      {"tojson", tojson_filter},
      {"trim", trim},
      {"unique", unique},
      {"upper", change<upper>},
      {"wordcount", wordcount},
  };
  return all;
}

}  // namespace

Filter find_filter(const std::string& name) {
  const auto found = filters().find(name);
  return found == filters().end() ? nullptr : found->second;
}

}  // namespace tessera::data::jinja
