// How the ranks of a group find each other: keys in a store.
//
// Waiting for a key that a peer sets ends early when a rank of the same
// communicator says through the store that it failed.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

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
  // The values of `prefix` and 0 .. size - 1, which the ranks set: `timeout` is
  // for all of them. Throws as get() does; `what`: of one, before its number.
  std::vector<std::string> get_each(const std::string& prefix, int64_t size,
                                    std::chrono::milliseconds timeout,
                                    const std::string& what);
  // Blocks until every rank of the group is here; throws as get() does.
  void meet(int64_t rank, int64_t size, std::chrono::milliseconds timeout);
  // Throws TS_CHECK_REACH if a rank announced a failure, or the store does not
  // answer in time.
  void check_no_failure(std::chrono::milliseconds timeout);
  // Tells all who wait at the store that this rank failed. Never throws.
  void announce_failure(const std::string& why) noexcept;
  // The keys of this group, as a store.
  c10::intrusive_ptr<c10d::Store> group_store() const;

 private:
  using Clock = std::chrono::steady_clock;
  // Until `end`, which `timeout` led to.
  std::string wait_for(const std::string& key, Clock::time_point end,
                       std::chrono::milliseconds timeout,
                       const std::string& what);
  void throw_announced();

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
};

}  // namespace tessera::comm
