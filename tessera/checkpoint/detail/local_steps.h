// What one host has of a run's local checkpoints (local.h), and which of them
// are newer than what the run has in its folder.
//
// An ID is of one line of steps: a run that does not go on from a local
// checkpoint takes another one, and the one before goes when that has saved
// something. So none of a branch that was left comes back.
// Errors: TS_CHECK_IO with path and reason.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/local_place.h"

namespace tessera::checkpoint::detail {

// In the folder of the run's checkpoints.
struct LocalId {
  std::string id;          // "": none was saved locally, or it is a copy
  std::string local_dir;   // where, on rank 0's host
  bool is_copied = false;  // from the folder of another run
};
LocalId read_local_id(const std::string& checkpoints);
void write_local_id(const LocalPlace& place, const std::string& id);
void remove_local_id(const std::string& checkpoints);
std::string new_local_id();

std::string folder_of_id(const std::string& local_dir, const std::string& id);
// Makes that folder, with mode 0700, unless it is there. Throws where it is a
// link, or another user's.
void take_folder(const LocalPlace& place, const std::string& folder);
// Removes those of this run but `kept`, and but those that some process holds
// by a FileLock; what stays is told.
void remove_other_folders(const LocalPlace& place, const std::string& kept);

// A step-N with a manifest that can be read, whatever files are there of it.
struct LocalStep {
  int64_t step = 0;
  // What was the newest in the run's folder when it was saved.
  std::optional<int64_t> base_step = {};
  int64_t base_sequence = -1;
  uint64_t manifest_hash = 0;
};
// None where there is no folder, or it is not this user's.
std::vector<LocalStep> local_steps(const std::string& folder);

// Removes each step-N but that one.
void remove_other_steps(const std::string& folder, int64_t step);
// Removes those without a manifest.
void remove_unfinished(const std::string& folder);

// What is the newest in the run's folder now.
struct Base {
  std::optional<int64_t> step = {};
  int64_t sequence = -1;
  std::vector<int64_t> unreadable = {};  // steps whose manifests are bad
};
Base base_in(const std::string& checkpoints);

// REQUIRES: `local` is of the ID that is the run's.
bool is_newer(const LocalStep& local, const Base& base);

}  // namespace tessera::checkpoint::detail
