#include "tessera/train/run_locks.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include "tessera/core/host.h"

namespace tessera::train {
namespace {

std::string this_process() {
  return c10::str("process ", ::getpid(), " on ", host_name());
}

}  // namespace

void RunLocks::take_folder(const RunFolder& folder) {
  folder_ = std::make_unique<FileLock>(
      folder.lock(), c10::str(this_process(),
                              ". Two runs cannot share a folder: give this "
                              "one another run.name.\n"));
}

void RunLocks::take_checkpoints(const engine::RunConfig& config,
                                const RunFolder& folder) {
  const std::string& path = folder.checkpoints();
  constexpr const char* kWayOut = "Give each run a checkpoint.dir of its own.";
  if (!config.checkpoint.dir.empty()) {
    named_checkpoints_ = std::make_unique<FileLock>(
        path + "/.checkpoints.lock",
        c10::str(this_process(), ", of the run '", config.run.name, "'. ",
                 kWayOut, "\n"));
  }
  checkpoints_ = std::make_unique<FileLock>(
      path, c10::str("a run that has its checkpoints there. ", kWayOut));
}

}  // namespace tessera::train
