#include "tessera/data/detail/tokenizer_config.h"

#include <cstdint>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::data::detail {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

fs::path tokenizer_folder(const std::string& tokenizer) {
  const fs::path path(tokenizer);
  return path.extension() == ".json" ? path.parent_path() : path;
}

ordered_json read_tokenizer_config(const std::string& tokenizer) {
  constexpr uint64_t kLongest = uint64_t{64} << 20;
  const fs::path path = tokenizer_folder(tokenizer) / kTokenizerConfig;
  if (!fs::exists(path)) return ordered_json::object();
  const std::string text = read_file(path, kLongest);
  ordered_json config =
      ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  TS_CHECK_IO(config.is_object(), path.string(), ": is no JSON object.");
  return config;
}

// "bos_token": "<s>", or {"content": "<s>", ...}.
SpecialTokens special_tokens_in(const ordered_json& config) {
  SpecialTokens tokens;
  for (const auto& [key, value] : config.items()) {
    if (!key.ends_with("_token")) continue;
    const ordered_json& token = value.is_object() && value.contains("content")
                                    ? value["content"]
                                    : value;
    if (token.is_string()) tokens.emplace_back(key, token.get<std::string>());
  }
  return tokens;
}

}  // namespace tessera::data::detail
