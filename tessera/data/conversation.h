// What a record of fine-tuning data says: a chat, or a prompt and its answer.
//
// Three forms, told by the record's keys:
//   {"messages": [{"role", "content"}, ...], "tools"?}          OpenAI's
//   {"conversations": [{"from", "value"}, ...], "system"?}      ShareGPT's
//   {"prompt", "completion"}, or other keys for the two         pairs
// Errors:  TS_CHECK_CONFIG with file, line and what is wrong about the record.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::data {

struct Conversation {
  // JSON lists: {"role": ..., "content": ...}; as templates take them.
  std::string messages;
  std::string tools;  // "": none
  // Of a pair: its two texts, for who has no template.
  struct Pair {
    std::string prompt, answer;
  };
  std::optional<Pair> pair = {};
};

// The conversations of a file of JSON lines, plain or compressed.
class Conversations {
 public:
  // `pair`: the keys of prompt and answer; none: those that are usual.
  explicit Conversations(const std::string& path,
                         std::vector<std::string> pair = {});
  ~Conversations();
  Conversations(Conversations&&) noexcept;

  // The next one, or nothing at the end.
  std::optional<Conversation> next();
  std::string place() const;  // "file:line"
  // Ends with place() and what is wrong.
  [[noreturn]] void refuse(const std::string& what) const;
  uint64_t consumed() const;  // bytes of the file that have been read

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Whether the first record of the file is a conversation: JSON lines with the
// keys of one of the forms.
bool has_conversations(const std::string& path,
                       const std::vector<std::string>& pair = {});

}  // namespace tessera::data
