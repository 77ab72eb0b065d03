#include "tessera/data/special_tokens.h"

#include "tessera/data/detail/tokenizer_config.h"

namespace tessera::data {

SpecialTokens special_tokens_of(const std::string& tokenizer) {
  if (tokenizer.empty()) return {};
  return detail::special_tokens_in(detail::read_tokenizer_config(tokenizer));
}

std::optional<std::string> eos_token_of(const std::string& tokenizer) {
  for (const auto& [name, token] : special_tokens_of(tokenizer)) {
    if (name == "eos_token") return token;
  }
  return std::nullopt;
}

}  // namespace tessera::data
