#include "tessera/comm/bench/series.h"

#include "tessera/comm/algorithms/collectives.h"
#include "tessera/comm/detail/verb.h"

namespace tessera::comm::bench {

std::string Series::name() const {
  std::string text = backend;
  if (algorithm != "auto") text += ":" + algorithm;
  if (registered) text += "+registered";
  return text;
}

bool Series::serves(Operation operation) const {
  if (algorithm == "auto" || algorithm == "hierarchical") return true;
  const auto known = algorithms::algorithm_of(algorithm);
  const auto verb = verb_of(operation);
  return known && verb && algorithms::implements(*known, *verb);
}

std::optional<Verb> verb_of(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return Verb::kAllReduce;
    case Operation::kAllGather:
      return Verb::kAllGather;
    case Operation::kReduceScatter:
      return Verb::kReduceScatter;
    case Operation::kBroadcast:
      return Verb::kBroadcast;
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::comm::bench
