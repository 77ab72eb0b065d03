// The files of the Hugging Face folder that a run's model came from, which the
// run keeps in its folder: the one that it came from may be gone when the model
// is exported.
#pragma once

#include <string>

#include "tessera/engine/run_config.h"
#include "tessera/train/run_folder.h"

namespace tessera::train {

// Where a run folder has them.
std::string kept_model_files(const std::string& run_folder);

// Keeps those of model.from, which may be a run that kept some. A run that is
// resumed keeps what it has. What a start that is killed leaves is never a part
// of them.
void keep_model_files(const engine::RunConfig& config, const RunFolder& folder,
                      bool resumed);

// Whether the tokenizer in `folder` is the one in `kept`, or there is none.
bool has_same_tokenizer(const std::string& folder, const std::string& kept);

}  // namespace tessera::train
