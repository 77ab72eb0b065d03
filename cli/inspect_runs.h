// What tessera inspect says of runs and of their checkpoints.
#pragma once

#include <filesystem>
#include <functional>

#include "tessera/core/detail/json.h"

namespace tessera::cli {

// "good", or what is wrong with the checkpoint in this folder.
using Verify = std::function<std::string(const std::string& folder)>;

bool is_run(const std::filesystem::path& path);

// A run: where it stands, its summary, its checkpoints. `verify` may be empty.
detail::Json describe_run(const std::filesystem::path& path,
                          const Verify& verify);

// The step-N of a folder. Empty: there are none.
detail::Json describe_checkpoints(const std::filesystem::path& folder,
                                  const Verify& verify);

// The runs of a folder, the last one that wrote first. Empty: there are none.
detail::Json describe_runs(const std::filesystem::path& folder);

}  // namespace tessera::cli
