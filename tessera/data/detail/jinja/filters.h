// The filters and tests of Jinja2 that templates of chats use.
#pragma once

#include <string>

#include "tessera/data/detail/jinja/value.h"

namespace tessera::data::jinja {

// The first argument is the value that is filtered or tested.
using Filter = Value (*)(const Arguments& arguments);
using Test = bool (*)(const Value& value, const Arguments& others);

// Null: there is none of this name.
Filter find_filter(const std::string& name);
Test find_test(const std::string& name);

}  // namespace tessera::data::jinja
