#include "tessera/train/model_files.h"

#include <filesystem>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/hugging_face_files.h"
#include "tessera/core/files.h"
#include "tessera/data/tokenizer.h"
#include "tessera/train/trained_model.h"

namespace tessera::train {

namespace fs = std::filesystem;

std::string kept_model_files(const std::string& run_folder) {
  return run_folder + "/model_files";
}

void keep_model_files(const engine::RunConfig& config, const RunFolder& folder,
                      bool resumed) {
  const std::string kept = kept_model_files(folder.path());
  const std::string copied = kept + ".tmp";  // what is named so may be a part
  fs::remove_all(copied);
  if (resumed && fs::exists(kept)) return;
  std::string source;
  if (!config.model.from.empty()) {
    source = find_trained_model(config.model.from, at::kFloat).model_files;
  }
  if (!source.empty() && fs::exists(kept) && fs::equivalent(source, kept)) {
    return;  // the run starts from itself
  }
  if (!source.empty()) checkpoint::copy_hugging_face_files(source, copied);
  fs::remove_all(kept);
  if (!fs::exists(copied)) return;
  fs::rename(copied, kept);
  sync_path(folder.path());
}

bool has_same_tokenizer(const std::string& folder, const std::string& kept) {
  const fs::path own = fs::path(folder) / "tokenizer.json";
  const fs::path other = fs::path(kept) / "tokenizer.json";
  if (!fs::exists(own)) return true;
  return fs::exists(other) &&
         data::Tokenizer::load(own.string()).to_json() ==
             data::Tokenizer::load(other.string()).to_json();
}

}  // namespace tessera::train
