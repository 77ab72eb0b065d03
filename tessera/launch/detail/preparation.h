// How ranks wait for those that prepare, for as long as these are at it.
#pragma once

#include <memory>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/launch/environment.h"

namespace tessera::launch::detail {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// While one lives, the others hear that this rank prepares.
class Heartbeat {
 public:
  Heartbeat(const RankEnvironment& here, StorePtr store);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Throws PeerRefused where one was meanwhile, also where the store has gone
  // with it.
  void check() const;

 private:
  struct State;  // shared with a thread that a silent store holds up
  std::shared_ptr<State> state_;
  std::thread thread_;
};

// This rank has prepared, or has nothing to. The last one decides.
void say_ready(const RankEnvironment& here, c10d::Store& store);

// Until all ranks are ready. Throws PeerRefused where one was; TS_CHECK_REACH
// where no rank that prepares was heard of for join_timeout, or the store is
// gone.
void await_decision(const RankEnvironment& here, const StorePtr& store);

}  // namespace tessera::launch::detail
