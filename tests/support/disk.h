// A folder for states in files, which are not kept on a file system that lies
// in memory: where /tmp does, it lies beside the test's program.
#pragma once

#include <filesystem>

#include "tessera/core/files.h"

namespace tessera::tests {

inline TemporaryFolder folder_on_disk() {
  std::filesystem::path in = temporary_files();
  if (lies_in_memory(in)) {
    in = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  }
  return TemporaryFolder("tessera", in);
}

}  // namespace tessera::tests
