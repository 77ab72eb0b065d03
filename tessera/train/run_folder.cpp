#include "tessera/train/run_folder.h"

#include <filesystem>
#include <system_error>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::train {

RunFolder::RunFolder(const engine::RunConfig& config)
    : path_(config.run.dir + "/" + config.run.name),
      tokens_(config.run.dir + "/token_cache"),
      checkpoints_(config.checkpoint.dir.empty() ? path_ + "/checkpoints"
                                                 : config.checkpoint.dir),
      traces_(config.monitor.trace > 0) {}

void RunFolder::create() const {
  std::vector<std::string> folders = {logs(), checkpoints()};
  if (traces_) folders.push_back(trace());
  for (const std::string& folder : folders) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    TS_CHECK_IO(!error, "cannot make the run folder ", folder, ": ",
                error.message(),
                ". Set run.dir to a folder that may be "
                "written.");
  }
}

}  // namespace tessera::train
