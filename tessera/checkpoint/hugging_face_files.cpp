#include "tessera/checkpoint/hugging_face_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <vector>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxBytes = uint64_t{256} << 20;  // no weights are so few
constexpr const char* kConfig = "config.json";
constexpr const char* kGeneration = "generation_config.json";
constexpr const char* kTemplates = "additional_chat_templates";

bool holds_weights(const std::string& name) {
  constexpr std::array<std::string_view, 10> kEndings = {
      ".safetensors", ".index.json", ".bin",     ".pt",   ".pth",
      ".ckpt",        ".h5",         ".msgpack", ".onnx", ".gguf"};
  return std::ranges::any_of(
      kEndings, [&](const auto ending) { return name.ends_with(ending); });
}

bool is_of_tokenizer(const fs::path& file) {
  constexpr std::array<std::string_view, 6> kBeginnings = {
      "tokenizer",    "special_tokens_map",
      "added_tokens", "chat_template",
      "vocab",        "merges"};
  const std::string name = file.filename().string();
  return std::ranges::any_of(kBeginnings,
                             [&](const auto beginning) {
                               return name.starts_with(beginning);
                             }) ||
         name.ends_with(".model") || name.ends_with(".tiktoken") ||
         file.parent_path() == kTemplates;
}

// Relative to the folder.
std::vector<fs::path> kept_files(const fs::path& folder) {
  std::vector<fs::path> files;
  const auto look = [&](const fs::path& below) {
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(folder / below, none)) {
      const std::string name = entry.path().filename().string();
      const bool kept = entry.is_regular_file(none) && !name.starts_with('.') &&
                        name != "README.md" && !holds_weights(name) &&
                        entry.file_size(none) <= kMaxBytes;
      if (kept) files.push_back(below / name);
    }
  };
  look("");
  look(kTemplates);
  return files;
}

void copy_one(const fs::path& from, const fs::path& to, const fs::path& file) {
  write_file_atomic(to / file, read_file(from / file, kMaxBytes));
}

}  // namespace

void copy_hugging_face_files(const std::string& from, const std::string& to) {
  for (const auto& file : kept_files(from)) copy_one(from, to, file);
}

void restore_hugging_face_files(const std::string& folder,
                                const ExportedFiles& files,
                                const models::HuggingFaceConfig& config) {
  const fs::path kept = files.kept, to = folder;
  // A folder that had none gets none.
  fs::remove(to / kGeneration);
  for (const auto& file : kept_files(kept)) {
    if (file == kConfig || file == kGeneration) continue;
    if (files.with_tokenizer || !is_of_tokenizer(file))
      copy_one(kept, to, file);
  }
  const auto text_of = [&](const char* name) {
    return tessera::detail::read_json_text(kept / name);
  };
  const std::string said = text_of(kConfig), source = (kept / kConfig).string();
  write_file_atomic(to / kConfig,
                    models::updated_hugging_face_config(said, source, config,
                                                        files.with_tokenizer));
  if (!fs::exists(kept / kGeneration)) return;
  const std::string generation = text_of(kGeneration);
  const bool same =
      files.with_tokenizer && models::has_tokens_of(said, source, config);
  write_file_atomic(to / kGeneration,
                    same ? generation
                         : models::updated_generation_config(
                               generation, (kept / kGeneration).string(),
                               config, files.with_tokenizer));
}

}  // namespace tessera::checkpoint
