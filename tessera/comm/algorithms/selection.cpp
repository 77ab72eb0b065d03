#include "tessera/comm/algorithms/selection.h"

#include "tessera/core/error.h"

namespace tessera::comm::algorithms {

namespace {

constexpr std::string_view kHierarchical = "hierarchical";

}  // namespace

bool goes_by_hosts(const std::string& name) {
  return name == kHierarchical || name == name_of(Algorithm::kStraight) ||
         name == name_of(Algorithm::kAggregated);
}

Selection::Selection(std::string name) : name_(std::move(name)) {
  if (goes_by_hosts(name_) || name_ == name_of(Algorithm::kOwn)) {
    table_ = TuningTable::from_environment();
  }
  if (name_ == kHierarchical) return;
  const auto algorithm = algorithm_of(name_);
  TS_CHECK_CONFIG(algorithm.has_value(), "comm.algorithm=", name_,
                  " is not known. Use auto, ring, recursive_doubling, tree, "
                  "hierarchical, straight or aggregated.");
  fixed_ = *algorithm;
}

void Selection::agree(Rendezvous rendezvous, int64_t rank,
                      std::chrono::milliseconds timeout) const {
  const std::string mine = c10::str(name_, " with ", table_.fingerprint());
  if (rank == 0) return rendezvous.set("algorithm", mine);
  const std::string first =
      rendezvous.get("algorithm", timeout, "rank 0's choice of algorithms");
  TS_CHECK_CONFIG(mine == first, "comm.algorithm is ", mine, " on rank ", rank,
                  ", ", first,
                  " on rank 0. Give all ranks the same comm.algorithm, and the "
                  "same file in TESSERA_COMM_TABLE.");
}

Chooser Selection::chooser(const std::string& backend, int64_t ranks) const {
  return [fixed = fixed_, table = table_, backend, ranks](Verb verb,
                                                          int64_t bytes) {
    if (fixed != Algorithm::kOwn && implements(fixed, verb)) return fixed;
    return table.algorithm_for(verb, backend, ranks, bytes);
  };
}

Connection Selection::apply(Connection connection,
                            const std::string& backend) const {
  const bool is_flat = fixed_ != Algorithm::kOwn && !goes_by_hosts(name_);
  if (!is_flat && !table_.knows(backend)) return connection;
  const int ranks = connection.backend->getSize();
  return make_flat(std::move(connection), chooser(backend, ranks));
}

}  // namespace tessera::comm::algorithms
