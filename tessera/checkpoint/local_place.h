// Where a run has its checkpoints in the memory of hosts (local.h), as one host
// sees it, without a word to others.
//
// Errors: TS_CHECK_IO where the file that names them is damaged.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::checkpoint {

struct LocalPlace {
  std::string local_dir;    // checkpoint.local_dir, of this host
  std::string checkpoints;  // the folder of the run's checkpoints, of all hosts
};

// Whether the run has saved any, on whatever hosts; they may be lost.
bool has_local_checkpoints(const std::string& checkpoints);
// From now on the run has none. Returns what folder they are in on rank 0's
// host; "": it had none.
std::string forget_local_checkpoints(const std::string& checkpoints);

// The run's folder on this host; "": it has none.
std::string local_checkpoint_folder(const LocalPlace& place);
// The folder step-N of the newest on this host that is newer than all in
// `checkpoints`; "": there is none.
std::string newest_local_checkpoint(const LocalPlace& place);

// Whether a run that goes on has its checkpoints in this folder.
bool is_used(const std::string& folder);

// Throws TS_CHECK_CONFIG unless local_dir can be written and has room for
// `bytes`, less those that this run has there.
void require_local_space(const LocalPlace& place, int64_t bytes);

}  // namespace tessera::checkpoint
