// How the ranks of a group find each other: keys in a store.
//
// Waiting for a key that a peer sets ends early when a rank of the same
// communicator says through the store that it failed.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace tessera::comm {

class Rendezvous {
 public:
  // `store` is the communicator's; keys of this group start with `prefix`.
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, std::string prefix);

  void set(const std::string& key, const std::string& value);
  // The value of `key`. Throws TS_CHECK_REACH when a rank failed, or time is
  // up, also where the store itself does not answer; `what` says what was
  // waited for.
  std::string get(const std::string& key, std::chrono::milliseconds timeout,
                  const std::string& what);
  // Blocks until every rank of the group is here; throws as get() does.
  void meet(int64_t rank, int64_t size, std::chrono::milliseconds timeout);
  // Throws TS_CHECK_REACH if a rank announced a failure.
  void check_no_failure();
  // Tells all who wait at the store that this rank failed. Never throws.
  void announce_failure(const std::string& why) noexcept;
  // The keys of this group, as a store.
  c10::intrusive_ptr<c10d::Store> group_store() const;

 private:
  std::string wait_for(const std::string& key,
                       std::chrono::milliseconds timeout,
                       const std::string& what);

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
};

}  // namespace tessera::comm
