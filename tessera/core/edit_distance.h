// How many letters must change to make one word of another.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

// Insertions, deletions, replacements and swaps of neighbours.
int64_t edit_distance(std::string_view a, std::string_view b);

}  // namespace tessera
