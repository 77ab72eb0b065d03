#include "tessera/benchmark/series.h"

#include "tessera/comm/algorithms/collectives.h"

namespace tessera::benchmark {

std::string Series::name() const {
  std::string text = backend;
  if (algorithm != "auto") text += ":" + algorithm;
  if (registered) text += "+registered";
  return text;
}

bool Series::serves(Operation operation) const {
  if (algorithm == "auto" || algorithm == "hierarchical") return true;
  const auto known = comm::algorithms::algorithm_of(algorithm);
  const auto verb = verb_of(operation);
  return known && verb && comm::algorithms::implements(*known, *verb);
}

std::optional<comm::Verb> verb_of(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return comm::Verb::kAllReduce;
    case Operation::kAllGather:
      return comm::Verb::kAllGather;
    case Operation::kReduceScatter:
      return comm::Verb::kReduceScatter;
    case Operation::kBroadcast:
      return comm::Verb::kBroadcast;
    case Operation::kAllToAll:
      return comm::Verb::kAllToAll;
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::benchmark
