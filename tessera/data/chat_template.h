// A tokenizer's chat template: messages to the text that a model reads, as
// transformers' apply_chat_template writes it.
//
// Read from chat_template.jinja, or chat_template in tokenizer_config.json, of
// a folder in Hugging Face's form, with the special tokens that the latter
// names. Of Jinja2 it takes what such templates use.
// Errors:  TS_CHECK_CONFIG with the template's name and line: what it uses and
//          is not supported, by name, when it is read; what goes wrong with
//          these messages, when they are rendered; where it would take more
//          steps or memory than any model's needs. TS_CHECK_IO: a file of the
//          folder is broken.
// Threads: any number may use a template at once.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/data/special_tokens.h"

namespace tessera::data {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

struct ChatOptions {
  bool add_generation_prompt = false;  // ends where the assistant would begin
  std::string tools = {};              // a JSON list; "": none
  std::string variables = {};  // a JSON object: {"enable_thinking": false}
};

struct RenderedChat {
  std::string text;
  // Bytes [first, second) of the text that the template marks as written by
  // the assistant.
  std::vector<std::pair<size_t, size_t>> answers;
};

// Messages that were read, of which the first ones can be rendered again and
// again.
class ReadMessages {
 public:
  size_t size() const;
  // "": it has none.
  std::string role(size_t message) const;

 private:
  friend class ChatTemplate;
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

class ChatTemplate {
 public:
  // `tokens`: {{"bos_token", "<s>"}}; `name`: for messages.
  ChatTemplate(std::string_view source, const std::string& name,
               SpecialTokens tokens = {});

  // That of a tokenizer's folder, or of the folder of its tokenizer.json; none
  // where it has none.
  static std::optional<ChatTemplate> find(const std::string& tokenizer);
  // A file with a template, with the special tokens of `tokenizer`.
  static ChatTemplate read(const std::string& path,
                           const std::string& tokenizer);

  std::string render(const std::vector<ChatMessage>& messages,
                     const ChatOptions& options = {}) const;
  // `messages`: a JSON list, with what templates know beyond role and content:
  // tool_calls, reasoning_content ...
  RenderedChat render_json(std::string_view messages,
                           const ChatOptions& options = {}) const;

  ReadMessages read_messages(std::string_view messages,
                             const ChatOptions& options = {}) const;
  // The first `count` of them, with the tools and variables of then.
  // `last_content`: in the place of the last one's.
  RenderedChat render_first(
      const ReadMessages& messages, size_t count,
      bool add_generation_prompt = false,
      const std::optional<std::string>& last_content = {}) const;

  // Whether it marks what the assistant writes ({% generation %}), of messages
  // with tools, or of others: a tokenizer may have a template for each.
  bool marks_answers(bool has_tools) const;
  const std::string& name() const;
  // As it was read, for who must know one from another.
  const std::string& source() const;

 private:
  struct Impl;
  explicit ChatTemplate(std::shared_ptr<const Impl> impl);
  // What the body returns; its failure with the template's name.
  template <typename Body>
  auto failing(const Body& body) const;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace tessera::data
