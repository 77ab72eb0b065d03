// The verbs and reductions of a group, and their names.
#pragma once

#include <cstdint>

#include "tessera/comm/group.h"

namespace tessera::comm {

enum class Verb : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kSend,
  kRecv,
  kBarrier,
};
inline constexpr int kNumVerbs = 8;

const char* name_of(Verb verb);    // "all_reduce", ...
const char* name_of(ReduceOp op);  // "sum", ...
bool reduces(Verb verb);
bool is_point_to_point(Verb verb);

}  // namespace tessera::comm
