// Which algorithms the groups of a communicator use: what comm.algorithm says,
// and for auto the table that TESSERA_COMM_TABLE names.
#pragma once

#include <string>

#include "tessera/comm/algorithms/flat.h"
#include "tessera/comm/algorithms/tuning_table.h"
#include "tessera/comm/base/rendezvous.h"

namespace tessera::comm::algorithms {

// Whether comm.algorithm of this name has groups over several hosts go by
// hosts: hierarchical, or one of the forms of its all_to_all.
bool goes_by_hosts(const std::string& name);

class Selection {
 public:
  // TS_CHECK_CONFIG where comm.algorithm is not known, or the table is wrong.
  explicit Selection(std::string name);

  // Throws TS_CHECK_CONFIG where this rank and rank 0 would choose differently:
  // they would wait for messages that nobody sends.
  void agree(Rendezvous rendezvous, int64_t rank,
             std::chrono::milliseconds timeout) const;

  // For messages over `backend` among `ranks` ranks.
  Chooser chooser(const std::string& backend, int64_t ranks) const;
  // `connection` of `backend` with these algorithms, or as it is where they are
  // its own anyway.
  Connection apply(Connection connection, const std::string& backend) const;

 private:
  std::string name_;
  Algorithm fixed_ = Algorithm::kOwn;  // for what it implements
  TuningTable table_;                  // for the rest; empty: not asked
};

}  // namespace tessera::comm::algorithms
