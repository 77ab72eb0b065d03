// What Python's operators do with values.
#pragma once

#include <optional>

#include "tessera/data/detail/jinja/value.h"

namespace tessera::data::jinja {

Value add(const Value& a, const Value& b);
Value subtract(const Value& a, const Value& b);
Value multiply(const Value& a, const Value& b);
Value divide(const Value& a, const Value& b);
Value floor_divide(const Value& a, const Value& b);
Value modulo(const Value& a, const Value& b);
Value power(const Value& a, const Value& b);
Value negate(const Value& a);
Value concatenate(const Value& a, const Value& b);  // ~

bool contains(const Value& whole, const Value& part);  // part in whole
std::vector<Value> items_of(const Value& iterable);    // as `for` takes them
int64_t length(const Value& value);

// a.name and a[key]; undefined where there is none.
Value attribute(const Value& of, const std::string& name);
Value element(const Value& of, const Value& key);
Value slice(const Value& of, const Value& first, const Value& last,
            const Value& step);

}  // namespace tessera::data::jinja
