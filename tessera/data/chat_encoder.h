// Conversations to tokens, and which of them the assistant writes.
//
// Where its template marks answers ({% generation %}), a conversation is one
// list of tokens and they are what it marks, as transformers'
// return_assistant_tokens_mask has it. Else an answer is what the template puts
// behind the messages before it, its own end of a turn included. A template may
// write an earlier answer differently once another one follows (Qwen 3 leaves
// out its reasoning): then there is one list for each such answer, which ends
// with it, as the model will see it.
// Errors:  TS_CHECK_CONFIG, as ChatTemplate; where the tokenizer's ids do not
//          lead back to the text; where there is neither template nor pair.
// Threads: any number may use one at once.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "tessera/data/chat_template.h"
#include "tessera/data/conversation.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

struct ChatTokens {
  std::vector<uint32_t> ids;
  std::vector<bool> answers;  // of each token: the assistant writes it
};

class ChatEncoder {
 public:
  // Without a template pairs are their two texts, behind what the tokenizer
  // puts before a text, and `end`, where there is one. REQUIRES: the tokenizer
  // outlives it.
  ChatEncoder(const Tokenizer& tokenizer,
              std::optional<ChatTemplate> chat_template,
              std::optional<int64_t> end);

  // Answers that begin well behind `max_tokens` may be left out: each is found
  // by two renderings of all before it.
  std::vector<ChatTokens> encode(
      const Conversation& conversation,
      int64_t max_tokens = std::numeric_limits<int64_t>::max()) const;

 private:
  ChatTokens encode_pair(const Conversation::Pair& pair) const;
  ChatTokens encode_rendered(RenderedChat chat) const;
  std::vector<RenderedChat> render_prefixes(const Conversation& conversation,
                                            int64_t max_tokens) const;
  size_t num_tokens(const std::string& text) const;

  const Tokenizer& tokenizer_;
  std::optional<ChatTemplate> template_;
  std::optional<int64_t> end_;
};

}  // namespace tessera::data
