#include "tessera/comm/verb.h"

#include <array>

namespace tessera::comm {

const char* name_of(Verb verb) {
  static constexpr std::array<const char*, kNumVerbs> kNames = {
      "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
      "broadcast",  "send",       "recv",           "barrier"};
  return kNames.at(static_cast<size_t>(verb));
}

const char* name_of(ReduceOp op) {
  static constexpr std::array kNames = {"sum", "mean", "min", "max", "product"};
  return kNames.at(static_cast<size_t>(op));
}

bool reduces(Verb verb) {
  return verb == Verb::kAllReduce || verb == Verb::kReduceScatter;
}

bool is_point_to_point(Verb verb) {
  return verb == Verb::kSend || verb == Verb::kRecv;
}

}  // namespace tessera::comm
