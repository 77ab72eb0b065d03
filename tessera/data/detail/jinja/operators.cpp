#include "tessera/data/detail/jinja/operators.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>

#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/jinja/methods.h"
#include "tessera/data/detail/jinja/text.h"

namespace tessera::data::jinja {
namespace {

constexpr int64_t kBytesOfItem = sizeof(Value);

[[noreturn]] void refuse(const char* sign, const Value& a, const Value& b) {
  require_defined(a);
  require_defined(b);
  throw Failure(c10::str("'", a.type_name(), "' ", sign, " '", b.type_name(),
                         "' is not possible"));
}

bool whole(const Value& a, const Value& b) {
  return !a.floating() && !b.floating();
}

void require_numbers(const char* sign, const Value& a, const Value& b) {
  if (!a.is_number() || !b.is_number()) refuse(sign, a, b);
}

// Python's integers have no end; ours do, and say so.
Value checked(bool overflow, const int64_t& result) {
  if (overflow) throw Failure("a number is beyond 64 bits");
  return result;
}

std::string escaped(const Text& text) {
  return text.markup ? text.text : escape_html(text.text);
}

// Where one of two texts is markup, the other is escaped beside it.
Value add_texts(const Text& a, const Text& b) {
  use_bytes(std::ssize(a.text) + std::ssize(b.text));
  if (!a.markup && !b.markup) return a.text + b.text;
  return Text{escaped(a) + escaped(b), /*markup=*/true};
}

Value repeat(const Value& value, int64_t times) {
  times = std::max<int64_t>(times, 0);
  const auto use = [&](size_t size, int64_t bytes) {
    int64_t all = 0;
    const bool is_beyond =
        __builtin_mul_overflow(static_cast<int64_t>(size) * bytes, times, &all);
    use_bytes(is_beyond ? INT64_MAX : all);
    if (size == 0) times = 0;
  };
  if (value.text()) {
    use(value.text()->text.size(), 1);
    std::string text;
    for (int64_t i = 0; i < times; ++i) text += value.text()->text;
    return text;
  }
  const auto& items = value.sequence()->items;
  use(items.size(), kBytesOfItem);
  std::vector<Value> all;
  for (int64_t i = 0; i < times; ++i) {
    all.insert(all.end(), items.begin(), items.end());
  }
  return {std::move(all), value.sequence()->tuple};
}

Value missing(const Value& of, const std::string& what) {
  return Undefined{c10::str("'", of.type_name(), "' has no ", what)};
}

// Where Python's slice begins and ends: see its slice.indices().
std::vector<int64_t> indices(int64_t size, const Value& first,
                             const Value& last, const Value& step) {
  const auto given = [](const Value& value) {
    return !value.is_none() && !value.undefined();
  };
  const int64_t by = given(step) ? step.as_integer() : 1;
  if (by == 0) throw Failure("a slice's step is 0");
  const int64_t lowest = by < 0 ? -1 : 0;
  const int64_t highest = by < 0 ? size - 1 : size;
  const auto place = [&](const Value& value, int64_t otherwise) {
    if (!given(value)) return otherwise;
    const int64_t at = value.as_integer();
    return std::clamp(at < 0 ? at + size : at, lowest, highest);
  };
  const int64_t begin = place(first, by < 0 ? highest : lowest);
  const int64_t end = place(last, by < 0 ? lowest : highest);
  std::vector<int64_t> all;
  for (int64_t i = begin; by < 0 ? i > end : i < end;) {
    all.push_back(i);
    if (by > size || by < -size) break;
    i += by;
  }
  return all;
}

}  // namespace

Value add(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (!whole(a, b)) return a.as_double() + b.as_double();
    int64_t sum = 0;
    return checked(__builtin_add_overflow(a.as_integer(), b.as_integer(), &sum),
                   sum);
  }
  if (a.text() && b.text()) return add_texts(*a.text(), *b.text());
  if (a.sequence() && b.sequence() &&
      a.sequence()->tuple == b.sequence()->tuple) {
    const auto& more = b.sequence()->items;
    use_bytes((length(a) + length(b)) * kBytesOfItem);
    std::vector<Value> items = a.sequence()->items;
    items.insert(items.end(), more.begin(), more.end());
    return {std::move(items), a.sequence()->tuple};
  }
  refuse("+", a, b);
}

Value subtract(const Value& a, const Value& b) {
  require_numbers("-", a, b);
  if (!whole(a, b)) return a.as_double() - b.as_double();
  int64_t result = 0;
  return checked(
      __builtin_sub_overflow(a.as_integer(), b.as_integer(), &result), result);
}

Value multiply(const Value& a, const Value& b) {
  const bool repeats = a.text() || a.sequence();
  if (repeats && b.is_number()) return repeat(a, b.as_integer());
  if ((b.text() || b.sequence()) && a.is_number()) {
    return repeat(b, a.as_integer());
  }
  require_numbers("*", a, b);
  if (!whole(a, b)) return a.as_double() * b.as_double();
  int64_t product = 0;
  return checked(
      __builtin_mul_overflow(a.as_integer(), b.as_integer(), &product),
      product);
}

Value divide(const Value& a, const Value& b) {
  require_numbers("/", a, b);
  if (b.as_double() == 0) throw Failure("a division by 0");
  return a.as_double() / b.as_double();
}

Value floor_divide(const Value& a, const Value& b) {
  require_numbers("//", a, b);
  if (b.as_double() == 0) throw Failure("a division by 0");
  if (!whole(a, b)) return std::floor(a.as_double() / b.as_double());
  const int64_t x = a.as_integer();
  const int64_t y = b.as_integer();
  if (y == -1) return negate(a);
  return x / y - static_cast<int64_t>(x % y != 0 && (x < 0) != (y < 0));
}

Value modulo(const Value& a, const Value& b) {
  if (a.text()) throw Failure("text % values is not supported");
  require_numbers("%", a, b);
  if (b.as_double() == 0) throw Failure("a division by 0");
  if (!whole(a, b)) {
    const double y = b.as_double();
    const double rest = std::fmod(a.as_double(), y);
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
  }
  const int64_t y = b.as_integer();
  if (y == -1) return 0;
  const int64_t rest = a.as_integer() % y;
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

Value power(const Value& a, const Value& b) {
  require_numbers("**", a, b);
  if (!whole(a, b) || b.as_integer() < 0) {
    return std::pow(a.as_double(), b.as_double());
  }
  if (equal(a, 1)) return 1;
  if (equal(a, -1)) return b.as_integer() % 2 == 0 ? 1 : -1;
  Value result = 1;
  for (int64_t i = 0; i < b.as_integer(); ++i) {
    result = multiply(result, a);  // of 2 or more it overflows soon
    if (equal(result, 0)) break;
  }
  return result;
}

Value negate(const Value& a) { return subtract(0, a); }

// Unlike +, it takes markup for text.
Value concatenate(const Value& a, const Value& b) {
  const std::string x = a.str();
  const std::string y = b.str();
  use_bytes(std::ssize(x) + std::ssize(y));
  return x + y;
}

bool contains(const Value& whole, const Value& part) {
  if (whole.text()) {
    const std::string& wanted = require_text(part, "'in' text");
    return find_text(whole.text()->text, wanted) != std::string::npos;
  }
  if (whole.dict()) return whole.dict()->find(part) != nullptr;
  const auto is_in = [&](const std::vector<Value>& items) {
    return std::any_of(items.begin(), items.end(),
                       [&](const Value& item) { return equal(item, part); });
  };
  if (whole.sequence()) return is_in(whole.sequence()->items);
  return is_in(items_of(whole));
}

std::vector<Value> items_of(const Value& iterable) {
  if (iterable.sequence()) {
    use_bytes(length(iterable) * kBytesOfItem);
    return iterable.sequence()->items;
  }
  std::vector<Value> items;
  if (iterable.undefined()) return items;
  if (iterable.dict()) {
    for (const auto& item : iterable.dict()->items) items.push_back(item.first);
    return items;
  }
  if (iterable.text()) {
    for (const uint32_t point : code_points(iterable.text()->text)) {
      items.emplace_back(text_of({point}));
    }
    return items;
  }
  throw Failure("'" + iterable.type_name() + "' has no items to go over");
}

int64_t length(const Value& value) {
  if (value.undefined()) return 0;
  if (value.text()) return length_of(value.text()->text);
  if (value.sequence()) return std::ssize(value.sequence()->items);
  if (value.dict()) return std::ssize(value.dict()->items);
  throw Failure("'" + value.type_name() + "' has no length");
}

Value attribute(const Value& of, const std::string& name) {
  use_steps(1);
  require_defined(of);
  if (auto method = find_method(of, name)) return *method;
  const Dict* dict = of.name_space() ? &of.name_space()->attributes : of.dict();
  const Value* found = dict == nullptr ? nullptr : dict->named(name);
  return found == nullptr ? missing(of, "attribute '" + name + "'") : *found;
}

Value element(const Value& of, const Value& key) {
  use_steps(1);
  require_defined(of);
  if (of.dict()) {
    const Value* found = of.dict()->find(key);
    if (found != nullptr) return *found;
  }
  const bool ordered = of.sequence() || of.text();
  if (ordered && (key.integer() || key.boolean())) {
    const int64_t size = length(of);
    int64_t at = key.as_integer();
    if (at < 0) at += size;
    if (at < 0 || at >= size) {
      return missing(of, c10::str("element ", key.as_integer()));
    }
    if (of.sequence()) return of.sequence()->items[at];
    return text_of({code_points(of.text()->text)[at]});
  }
  if (key.text()) return attribute(of, key.text()->text);
  return missing(of, "element " + key.repr());
}

Value slice(const Value& of, const Value& first, const Value& last,
            const Value& step) {
  require_defined(of);
  if (of.text()) {
    const std::vector<uint32_t> points = code_points(of.text()->text);
    std::vector<uint32_t> taken;
    for (const int64_t i : indices(std::ssize(points), first, last, step)) {
      taken.push_back(points[i]);
    }
    return text_of(taken);
  }
  if (of.sequence() == nullptr) {
    throw Failure("'" + of.type_name() + "' cannot be sliced");
  }
  const auto& items = of.sequence()->items;
  std::vector<Value> taken;
  for (const int64_t i : indices(std::ssize(items), first, last, step)) {
    taken.push_back(items[i]);
  }
  return {std::move(taken), of.sequence()->tuple};
}

}  // namespace tessera::data::jinja
