// A question to a model that was trained on chats, as its template writes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/data/tokenizer.h"

namespace tessera::cli {

struct ChatPrompt {
  std::vector<int64_t> ids;
  // The token that the template puts behind an answer, where it is one.
  std::vector<int64_t> ends;
};

// `folder`: of the tokenizer, with the template; `system`: "" for none.
// TS_CHECK_CONFIG where it has none.
ChatPrompt chat_prompt(const std::string& system, const std::string& question,
                       const std::string& folder,
                       const data::Tokenizer& tokenizer);

}  // namespace tessera::cli
