// tokenizer_config.json of a tokenizer's folder, as it is read.
//
// Errors: TS_CHECK_IO where it is there and no JSON object.
#pragma once

#include <filesystem>
#include <string>

#include "tessera/core/detail/json.h"
#include "tessera/data/special_tokens.h"

namespace tessera::data::detail {

inline constexpr const char* kTokenizerConfig = "tokenizer_config.json";

// `tokenizer`: a folder, or its tokenizer.json.
std::filesystem::path tokenizer_folder(const std::string& tokenizer);
// {} where the folder has none.
tessera::detail::Json read_tokenizer_config(const std::string& tokenizer);
SpecialTokens special_tokens_in(const tessera::detail::Json& config);

}  // namespace tessera::data::detail
