#include "tessera/comm/base/fingerprints.h"

#include <cstdlib>
#include <string_view>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"

namespace tessera::comm {
namespace {

std::string key_of(uint64_t number, int64_t rank) {
  return c10::str(number, "/", rank);
}

// What must agree, and what is said of it.
std::string fingerprint_of(const Operation& operation) {
  return c10::str(to_hex(operation.signature()), ' ', operation.describe());
}

std::string said_in(const std::string& fingerprint) {
  return fingerprint.substr(fingerprint.find(' ') + 1);
}

bool agree(const std::string& one, const std::string& other) {
  return one.substr(0, one.find(' ')) == other.substr(0, other.find(' '));
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
  rendezvous_.set(key_of(++compared_, rank_), own);
  const auto size = static_cast<int64_t>(ranks_.size());
  const int64_t last = rank_ == 0 ? size : 1;
  for (int64_t peer = 0; peer < last; ++peer) {
    if (peer != rank_) compare_with(peer, own);
  }
}

void Fingerprints::compare_with(int64_t peer, const std::string& own) {
  const std::string theirs = rendezvous_.get(
      key_of(compared_, peer), timeout_,
      c10::str("rank ", ranks_[peer], " to call ", said_in(own)));
  TS_CHECK(agree(own, theirs), "ranks disagree: rank ", ranks_[rank_],
           " calls ", said_in(own), ", but rank ", ranks_[peer], " calls ",
           said_in(theirs));
}

}  // namespace tessera::comm
