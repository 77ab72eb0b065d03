#include "tessera/comm/base/fingerprints.h"

#include <cstdlib>
#include <string_view>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::string key_of(uint64_t sequence, int64_t rank) {
  return c10::str(sequence, "/", rank);
}

// What must agree: ranks may bring tensors of their own shapes to all_to_all.
std::string fingerprint_of(Operation operation) {
  if (operation.verb == Verb::kAllToAll) operation.shape = {};
  return operation.describe();
}

}  // namespace

bool fingerprints_are_on() {
  const char* level = std::getenv("TORCH_DISTRIBUTED_DEBUG");
  return level != nullptr && std::string_view(level) == "DETAIL";
}

Fingerprints::Fingerprints(Rendezvous rendezvous, std::vector<int64_t> ranks,
                           int64_t rank, std::chrono::milliseconds timeout)
    : rendezvous_(std::move(rendezvous)),
      ranks_(std::move(ranks)),
      rank_(rank),
      timeout_(timeout) {}

void Fingerprints::compare(const Operation& operation) {
  const std::string own = fingerprint_of(operation);
  rendezvous_.set(key_of(operation.sequence, rank_), own);
  const auto size = static_cast<int64_t>(ranks_.size());
  const int64_t last = rank_ == 0 ? size : 1;
  for (int64_t peer = 0; peer < last; ++peer) {
    if (peer != rank_) compare_with(peer, operation, own);
  }
}

void Fingerprints::compare_with(int64_t peer, const Operation& operation,
                                const std::string& own) {
  const std::string theirs =
      rendezvous_.get(key_of(operation.sequence, peer), timeout_,
                      c10::str("rank ", ranks_[peer], " to call ", own));
  TS_CHECK(theirs == own, "ranks disagree: rank ", ranks_[rank_], " calls ",
           own, ", but rank ", ranks_[peer], " calls ", theirs);
}

}  // namespace tessera::comm
