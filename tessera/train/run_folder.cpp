#include "tessera/train/run_folder.h"

#include <filesystem>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera::train {

RunFolder::RunFolder(const engine::RunConfig& config)
    : path_(config.run.dir + "/" + config.run.name),
      checkpoints_(config.checkpoint.dir.empty() ? path_ + "/checkpoints"
                                                 : config.checkpoint.dir) {}

void RunFolder::create() const {
  for (const std::string& folder : {logs(), checkpoints(), tokens()}) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    TS_CHECK_IO(!error, "cannot make the run folder ", folder, ": ",
                error.message(),
                ". Set run.dir to a folder that may be "
                "written.");
  }
}

}  // namespace tessera::train
