// This process as one rank of those that a launcher started: `tessera launch`,
// torchrun, mpirun, srun; or alone, where none did.
//
//   const tessera::StartedRanks started;
//   train(started.ranks());
//
// Comm:    launch::join(), which waits for all ranks.
// Errors:  launch/environment.h's and store.h's.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/comm/communicator.h"

namespace tessera {

class StartedRanks {
 public:
  // Shares out the host's cores among its ranks; messages of this thread name
  // the rank from now on.
  StartedRanks();
  ~StartedRanks();
  StartedRanks(StartedRanks&&) noexcept;
  StartedRanks& operator=(StartedRanks&&) = delete;

  comm::Communicator& ranks() const;
  int64_t local_rank() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
