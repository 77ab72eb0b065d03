#include <map>

#include "tessera/data/detail/jinja/filters.h"
#include "tessera/data/detail/jinja/operators.h"
#include "tessera/data/detail/jinja/text.h"

namespace tessera::data::jinja {
namespace {

const Value& only(const Arguments& others) {
  if (others.positional.size() != 1 || !others.named.empty()) {
    throw Failure("this test takes one argument");
  }
  return others.positional[0];
}

bool is_sequence(const Value& value) {
  return value.undefined() || value.text() || value.sequence() || value.dict();
}

// The same thing: of the values that are compared so (none, true, false).
bool same_as(const Value& a, const Value& b) {
  return a.type_name() == b.type_name() && equal(a, b);
}

bool cased_as(const Value& value, std::string (*change)(std::string_view)) {
  const std::string text = soft_text(value);
  return change(text) == text && lower(text) != upper(text);
}

const std::map<std::string, Test, std::less<>>& tests() {
  using V = const Value&;
  using A = const Arguments&;
  static const auto equals = [](V v, A a) { return equal(v, only(a)); };
  static const auto differs = [](V v, A a) { return !equal(v, only(a)); };
  static const auto below = [](V v, A a) { return less(v, only(a)); };
  static const auto above = [](V v, A a) { return less(only(a), v); };
  static const auto up_to = [](V v, A a) { return !less(only(a), v); };
  static const auto from = [](V v, A a) { return !less(v, only(a)); };
  static const std::map<std::string, Test, std::less<>> all = {
      {"defined", [](V v, A) { return v.undefined() == nullptr; }},
      {"undefined", [](V v, A) { return v.undefined() != nullptr; }},
      {"none", [](V v, A) { return v.is_none(); }},
      {"boolean", [](V v, A) { return v.boolean() != nullptr; }},
      {"true", [](V v, A) { return v.boolean() && *v.boolean(); }},
      {"false", [](V v, A) { return v.boolean() && !*v.boolean(); }},
      {"integer", [](V v, A) { return v.integer() != nullptr; }},
      {"float", [](V v, A) { return v.floating() != nullptr; }},
      {"number", [](V v, A) { return v.is_number(); }},
      {"string", [](V v, A) { return v.text() != nullptr; }},
      {"mapping", [](V v, A) { return v.dict() != nullptr; }},
      {"sequence", [](V v, A) { return is_sequence(v); }},
      {"iterable", [](V v, A) { return is_sequence(v); }},
      {"callable", [](V v, A) { return v.callable() != nullptr; }},
      {"lower", [](V v, A) { return cased_as(v, lower); }},
      {"upper", [](V v, A) { return cased_as(v, upper); }},
      {"odd", [](V v, A) { return modulo(v, 2).truth(); }},
      {"even", [](V v, A) { return !modulo(v, 2).truth(); }},
      {"divisibleby", [](V v, A a) { return !modulo(v, only(a)).truth(); }},
      {"sameas", [](V v, A a) { return same_as(v, only(a)); }},
      {"in", [](V v, A a) { return contains(only(a), v); }},
      {"eq", equals},
      {"==", equals},
      {"equalto", equals},
      {"ne", differs},
      {"!=", differs},
      {"lt", below},
      {"<", below},
      {"lessthan", below},
      {"gt", above},
      {">", above},
      {"greaterthan", above},
      {"le", up_to},
      {"<=", up_to},
      {"ge", from},
      {">=", from},
  };
  return all;
}

}  // namespace

Test find_test(const std::string& name) {
  const auto found = tests().find(name);
  return found == tests().end() ? nullptr : found->second;
}

}  // namespace tessera::data::jinja
