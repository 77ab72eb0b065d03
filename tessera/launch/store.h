// How ranks find each other: the store of an environment, and the roll call.
//
// join() makes the c10d store (a FileStore among the ranks of run_local, which
// opens no network port; a TCPStore across hosts, listening on exactly the
// address of MASTER_ADDR where that address is this host's own), then waits
// until every rank has said that it is there.
// Comm:   a handful of keys per rank; no group exists yet.
// Errors: 69 (TS_CHECK_REACH) a rendezvous that does not answer, a port that is
//         held by another process, absent ranks (listed) after join_timeout;
//         78 a rank number that is taken, a world size that peers do not share.
#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/launch/environment.h"

namespace tessera::launch {

struct Meeting {
  RankEnvironment environment;  // complete: no -1 left
  c10::intrusive_ptr<c10d::Store> store;
  // This host, as its peers reach it; the loopback when all ranks are here.
  std::string address = kLoopback;
};

Meeting join(RankEnvironment environment);

}  // namespace tessera::launch
