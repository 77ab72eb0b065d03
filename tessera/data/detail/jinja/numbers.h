// Numbers as Python reads and rounds them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/data/detail/jinja/value.h"

namespace tessera::data::jinja {

// What int() and float() make of a whole text; none where they refuse it.
std::optional<int64_t> whole_number_in(const std::string& text);
std::optional<double> number_in(const std::string& text);

// As Python's round(): a whole number stays one; of others the decimal that is
// nearest to what the number is in truth. Failure on one too large to be whole.
Value rounded(const Value& value, int64_t digits);

}  // namespace tessera::data::jinja
