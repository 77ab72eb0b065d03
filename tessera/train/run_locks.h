// Whose a run folder is, and the folder of its checkpoints, which may lie
// elsewhere: of one run at a time. Held by rank 0.
#pragma once

#include <memory>

#include "tessera/core/files.h"
#include "tessera/engine/run_config.h"
#include "tessera/train/run_folder.h"

namespace tessera::train {

class RunLocks {
 public:
  // Errors: TS_CHECK_IO where another run holds it, with its words.
  void take_folder(const RunFolder& folder);
  // Where other runs may write too, by their checkpoint.dir, in which a lock
  // says whose it is.
  void take_checkpoints(const engine::RunConfig& config,
                        const RunFolder& folder);

 private:
  std::unique_ptr<FileLock> folder_, named_checkpoints_, checkpoints_;
};

}  // namespace tessera::train
