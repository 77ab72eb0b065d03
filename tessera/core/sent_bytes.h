// What a collective takes out of a rank.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

// Of `bytes`, the whole tensor of a verb ("all_reduce", ...), those that leave
// each of N ranks in a ring, before its factor (N - 1)/N: an all_reduce is a
// reduce_scatter and an all_gather. What is received another rank sends.
inline int64_t sent_bytes(std::string_view verb, int64_t bytes) {
  if (verb == "recv") return 0;
  return verb == "all_reduce" ? 2 * bytes : bytes;
}

}  // namespace tessera
