// The special tokens that a tokenizer's folder names by their use.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::data {

// "bos_token", "eos_token" ..., and what they are: "<s>".
using SpecialTokens = std::vector<std::pair<std::string, std::string>>;

// As tokenizer_config.json in the folder of `tokenizer` has them; none where
// there is no such file, or `tokenizer` is "".
SpecialTokens special_tokens_of(const std::string& tokenizer);

// The one named "eos_token".
std::optional<std::string> eos_token_of(const std::string& tokenizer);

}  // namespace tessera::data
