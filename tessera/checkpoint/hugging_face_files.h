// What a Hugging Face folder holds beside its weights: configurations, the
// tokenizer, chat templates. Who starts from a folder keeps them, and gives
// them to the folder that it exports to.
//
// Kept:   every file of at most 256 MiB, but weights, their index, README.md
//         (which tells of these weights) and hidden files; of the folders
//         below, additional_chat_templates alone.
// Errors: TS_CHECK_IO, with the path.
#pragma once

#include <string>

#include "tessera/models/hugging_face_config.h"

namespace tessera::checkpoint {

// From one folder to another, which is made where it is missing; files of the
// same names are replaced.
void copy_hugging_face_files(const std::string& from, const std::string& to);

struct ExportedFiles {
  std::string kept;            // the folder that has them
  bool with_tokenizer = true;  // and templates; else only the configurations
};

// Gives `folder`, which save_hugging_face() wrote, the files of `files.kept`,
// in which only what `config` has otherwise is changed.
void restore_hugging_face_files(const std::string& folder,
                                const ExportedFiles& files,
                                const models::HuggingFaceConfig& config);

}  // namespace tessera::checkpoint
