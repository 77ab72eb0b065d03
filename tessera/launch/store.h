// How ranks find each other: the store of an environment, and the roll call.
//
// join() makes the c10d store (a FileStore among the ranks of run_local, which
// opens no network port; a TCPStore across hosts, listening on exactly the
// address of MASTER_ADDR where that address is this host's own and not its
// loopback by a name that means another one elsewhere), then waits until every
// rank has said that it is there. begin_together() goes on from there to
// whatever connects the ranks. A rank that is refused or fails on this way, or
// before it (refuse()), ends all others with its reason.
// Comm:   a handful of keys per rank; no group exists yet. A look at one key
//         every 100 ms by who waits; a beat a second by who prepares.
// Errors: 69 (TS_CHECK_REACH) a rendezvous that does not answer, a port that is
//         held by another process, absent ranks (listed) after join_timeout;
//         78 a rank number that is taken, a world size that peers do not share,
//         a MASTER_ADDR that hides this host's address from it;
//         PeerRefused, with the code of that rank, its name and its words.
#pragma once

#include <exception>
#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/core/error.h"
#include "tessera/launch/environment.h"

namespace tessera::launch {

struct Meeting {
  RankEnvironment environment;  // complete: no -1 left
  c10::intrusive_ptr<c10d::Store> store;
  // This host, as its peers reach it; the loopback when all ranks are here.
  std::string address = kLoopback;
};

// What another rank was refused for: nothing of it is about this one.
class PeerRefused : public Error {
 public:
  using Error::Error;
};

Meeting join(RankEnvironment environment);

// `prepare` on the first rank of each host, for as long as it takes; `begin` on
// every rank, once all hosts are prepared. TS_CHECK_REACH names a rank that
// prepares and is not heard of for join_timeout: stopped, or cut off.
void begin_together(const Meeting& meeting,
                    const std::function<void()>& prepare,
                    const std::function<void()>& begin);

// Tells those that wait, or will, why this rank does not join them. Where
// nobody comes it says so after a second and takes join_timeout; never throws.
void refuse(const RankEnvironment& environment,
            const std::exception& error) noexcept;

}  // namespace tessera::launch
