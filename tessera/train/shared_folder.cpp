#include "tessera/train/shared_folder.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/host.h"

namespace tessera::train {

namespace {
constexpr const char* kSeenByAll = ".seen-by-all-";
}  // namespace

void require_shared(const std::string& folder, comm::Group& world) {
  if (world.size() == 1) return;
  namespace fs = std::filesystem;
  const bool leads = world.rank() == 0;
  // A name that nobody has asked for before: what a network file system
  // remembers of names that are not there does not count.
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  const std::string file = comm::text_of_rank_0(
      world, c10::str(folder, "/", kSeenByAll, ::getpid(), "-", now));
  const std::string host = comm::text_of_rank_0(world, host_name());
  std::string complaint = comm::complaint_of([&] {
    if (!leads) return;
    for (const auto& entry : fs::directory_iterator(folder)) {
      // Of a start that was killed.
      if (entry.path().filename().string().starts_with(kSeenByAll)) {
        fs::remove(entry.path());
      }
    }
    write_file_atomic(file, "Removed at once.\n");
  });
  complaint = comm::first_complaint(world, complaint);
  TS_CHECK_IO(complaint.empty(), folder, ": cannot be written: ", complaint);
  std::error_code unseen;
  if (!fs::exists(file, unseen)) {
    complaint = c10::str(
        "rank ", world.rank(), " on ", host_name(),
        " does not see what rank 0 on ", host, " writes into ", folder,
        ", where every rank puts its part of a checkpoint. Set run.dir to a "
        "folder on a file system that all hosts share (or checkpoint.dir, or "
        "checkpoint.every and checkpoint.local_every 0 for a run that saves "
        "nothing, also where it is stopped).");
  }
  complaint = comm::first_complaint(world, complaint);
  std::error_code ignored;
  if (leads) fs::remove(file, ignored);
  TS_CHECK_CONFIG(complaint.empty(), complaint);
}

}  // namespace tessera::train
