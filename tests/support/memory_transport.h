// Ranks that are threads of one process, over a network that is made up: it
// counts every message and keeps a clock for each rank.
//
// Clock:  a message of n bytes occupies its sender's way out and its receiver's
//         way in for alpha + n beta; a rank that waits for it goes on no
//         earlier. Reducing n bytes takes n gamma. Sending and receiving go on
//         side by side. So seconds() is what the algorithm costs in the
//         alpha-beta-gamma model, whatever the threads did: alpha 1 alone
//         counts steps, beta 1 alone the bytes along the longest way.
// Source: the model of Thakur, Rabenseifner, Gropp, "Optimization of Collective
//         Communication Operations in MPICH", 2005, section 3.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "tessera/comm/algorithms/cost.h"
#include "tessera/comm/algorithms/transport.h"

namespace tessera::testing {

// What one rank did.
struct RankCost {
  int64_t messages = 0;  // sent
  int64_t bytes = 0;     // sent
  int64_t reduced = 0;   // bytes
  double seconds = 0.0;  // its clock
};

class MemoryNetwork {
 public:
  MemoryNetwork(int64_t ranks, comm::algorithms::Link link);

  // The end of one rank; lives as long as the network, used by one thread.
  comm::algorithms::Transport& end_of(int64_t rank);
  // Of a rank whose thread is done.
  const RankCost& cost_of(int64_t rank) const;
  // The clock of the last rank.
  double seconds() const;

 private:
  class End;
  struct Message {
    std::vector<std::byte> data;
    double sent = 0.0;  // when its last byte was
  };
  using Way = std::pair<int64_t, int64_t>;  // from, to

  comm::algorithms::Link link_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Way, std::deque<Message>> in_flight_;
  std::vector<std::shared_ptr<End>> ends_;
};

}  // namespace tessera::testing
