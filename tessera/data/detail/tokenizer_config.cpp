#include "tessera/data/detail/tokenizer_config.h"

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::data::detail {

namespace fs = std::filesystem;
using tessera::detail::Json;

fs::path tokenizer_folder(const std::string& tokenizer) {
  const fs::path path(tokenizer);
  return path.extension() == ".json" ? path.parent_path() : path;
}

Json read_tokenizer_config(const std::string& tokenizer) {
  const fs::path path = tokenizer_folder(tokenizer) / kTokenizerConfig;
  if (!fs::exists(path)) return Json::object();
  Json config = tessera::detail::parse_json(
      tessera::detail::read_json_text(path), path.string());
  TS_CHECK_IO(config.is_object(), path.string(), ": is no JSON object.");
  return config;
}

// "bos_token": "<s>", or {"content": "<s>", ...}.
SpecialTokens special_tokens_in(const Json& config) {
  SpecialTokens tokens;
  for (const auto& [key, value] : config.items()) {
    if (!key.ends_with("_token")) continue;
    const Json& token = value.is_object() && value.contains("content")
                            ? value["content"]
                            : value;
    if (token.is_string()) tokens.emplace_back(key, token.get<std::string>());
  }
  return tokens;
}

}  // namespace tessera::data::detail
