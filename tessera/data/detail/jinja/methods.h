// The methods of Python's text, lists and dicts that templates call. Those that
// would change a value are not there, as in Hugging Face's sandbox.
#pragma once

#include <optional>
#include <string>

#include "tessera/data/detail/jinja/value.h"

namespace tessera::data::jinja {

// Bound to `of`, or nothing where its type has no such method.
std::optional<Value> find_method(const Value& of, const std::string& name);
// Whether any type has it.
bool is_method(const std::string& name);

}  // namespace tessera::data::jinja
