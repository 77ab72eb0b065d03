// Text of others, such as names in files, for a terminal or a log.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// Control characters (of ASCII and of Latin-1's upper half), bytes that are not
// UTF-8, and marks that turn the direction of text become escapes such as
// \u001b; newlines and tabs too, unless `keeps_lines`. All else stays.
std::string printable(std::string_view text, bool keeps_lines = false);

// JSON holds nothing else.
bool is_utf8(std::string_view text);

}  // namespace tessera
