// A checkpoint that is read stays where it is.
#pragma once

#include <string>

#include "tessera/core/fd.h"

namespace tessera::checkpoint {

// While one lives, the run that saves there leaves this checkpoint to a later
// save to remove. By a lock on its manifest: hosts see each other's where their
// file system has locks.
class Reading {
 public:
  // TS_CHECK_IO where it has gone, or is being removed.
  explicit Reading(const std::string& step_folder);

 private:
  Fd manifest_;
};

// Removes a checkpoint, unless it is being read. True: it has gone.
bool remove_unless_read(const std::string& folder, int64_t step);

}  // namespace tessera::checkpoint
