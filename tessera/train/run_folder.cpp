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
      local_dir_(config.checkpoint.local_dir),
      traces_(config.monitor.trace > 0) {}

std::vector<std::string> RunFolder::below() const {
  std::vector<std::string> folders = {logs(), checkpoints()};
  if (traces_) folders.push_back(trace());
  return folders;
}

std::vector<std::string> RunFolder::missing() const {
  std::vector<std::string> all = below();
  all.push_back(tokens());
  std::vector<std::string> missing;
  for (const std::string& each : all) {
    const auto first = std::ssize(missing);
    std::filesystem::path path(each);
    for (std::error_code error; !path.empty() && path != path.root_path() &&
                                !std::filesystem::exists(path, error);
         path = path.parent_path()) {
      missing.insert(missing.begin() + first, path.string());
    }
  }
  return missing;
}

void RunFolder::create() const {
  for (const std::string& folder : below()) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    TS_CHECK_IO(!error, "cannot make the run folder ", folder, ": ",
                error.message(), ". Set ", key_of(folder),
                " to a folder that may be written.");
  }
}

void RunFolder::check() const {
  for (const std::string& folder : below()) {
    std::error_code none;
    TS_CHECK_IO(!std::filesystem::exists(folder, none) ||
                    std::filesystem::is_directory(folder, none),
                key_of(folder), ": ", folder, " is there, and is no folder.");
  }
}

std::string RunFolder::key_of(const std::string& folder) const {
  const bool is_elsewhere = checkpoints_ != path_ + "/checkpoints";
  return is_elsewhere && folder == checkpoints_ ? "checkpoint.dir" : "run.dir";
}

}  // namespace tessera::train
