#include "tessera/data/conversation.h"

#include <array>
#include <map>

#include "tessera/core/error.h"
#include "tessera/data/detail/json_records.h"

namespace tessera::data {
namespace {

using detail::Json;
using detail::JsonRecords;
using tessera::detail::in_quotes;

constexpr const char* kExample =
    "{\"messages\": [{\"role\": \"user\", \"content\": \"...\"}, ...]}";
constexpr std::array kPairs = {
    std::array{"prompt", "completion"},  std::array{"question", "answer"},
    std::array{"instruction", "output"}, std::array{"prompt", "response"},
    std::array{"prompt", "answer"},      std::array{"instruction", "response"}};

const std::map<std::string, std::string, std::less<>>& speakers() {
  static const std::map<std::string, std::string, std::less<>> all = {
      {"system", "system"},       {"human", "user"},
      {"user", "user"},           {"gpt", "assistant"},
      {"assistant", "assistant"}, {"model", "assistant"},
      {"chatgpt", "assistant"},   {"bing", "assistant"},
      {"bard", "assistant"},      {"tool", "tool"},
      {"observation", "tool"},    {"function_response", "tool"}};
  return all;
}

// The keys of the record's two texts, where it is a pair.
std::optional<std::array<std::string, 2>> pair_keys(
    const Json& record, const std::vector<std::string>& given) {
  if (given.size() == 2) {
    if (!record.contains(given[0]) || !record.contains(given[1])) return {};
    return std::array{given[0], given[1]};
  }
  for (const auto& [prompt, answer] : kPairs) {
    if (record.contains(prompt) && record.contains(answer)) {
      return std::array<std::string, 2>{prompt, answer};
    }
  }
  return {};
}

bool is_conversation(const Json& record, const std::vector<std::string>& pair) {
  return record.contains("messages") || record.contains("conversations") ||
         pair_keys(record, pair).has_value();
}

// By its key, a prompt that may leave what it is about to another.
bool is_about_more(const std::string& prompt) {
  return prompt == "instruction" || prompt == "question";
}

class Reader {
 public:
  Reader(const JsonRecords& records, const std::vector<std::string>& pair)
      : records_(records), pair_(pair) {}

  Conversation read() const {
    const Json& record = records_.record();
    const bool by_pair = !pair_.empty();
    if (!by_pair && record.contains("messages")) return openai(record);
    if (!by_pair && record.contains("conversations")) return sharegpt(record);
    const auto keys = pair_keys(record, pair_);
    if (keys) return pair(record, *keys);
    records_.refuse(
        by_pair
            ? c10::str("the record has not both ", in_quotes(pair_[0]), " and ",
                       in_quotes(pair_[1]), ", which data.pair names")
            : "the record is no conversation: it has neither "
              "\"messages\" nor \"conversations\" nor the keys of a pair "
              "(\"prompt\" and \"completion\", \"question\" and "
              "\"answer\" ...). Name a pair's keys by data.pair");
  }

 private:
  const Json& list_in(const Json& record, const char* key) const {
    const Json& list = record.at(key);
    if (!list.is_array() || list.empty()) {
      records_.refuse(c10::str(in_quotes(key), " is no list of messages"));
    }
    return list;
  }

  const std::string& text_in(const Json& object, const std::string& key,
                             const std::string& of) const {
    const auto found = object.is_object() ? object.find(key) : object.end();
    if (!object.is_object() || found == object.end() || !found->is_string()) {
      records_.refuse(c10::str(of, " has no text ", in_quotes(key)));
    }
    return found->get_ref<const std::string&>();
  }

  // Content is text, parts of text, or nothing beside calls of tools.
  void check_content(const Json& message, const std::string& of) const {
    const auto content = message.find("content");
    const bool calls = message.contains("tool_calls");
    const bool none = content == message.end() || content->is_null();
    if (none ? calls : content->is_string() || content->is_array()) return;
    records_.refuse(of + " has no text \"content\"");
  }

  void check_answered(bool answered) const {
    if (answered) return;
    records_.refuse(
        "no message is of the assistant: there is nothing to learn");
  }

  std::string tools_of(const Json& record) const {
    const auto tools = record.find("tools");
    if (tools == record.end() || tools->is_null()) return "";
    if (!tools->is_array()) records_.refuse("\"tools\" is no list");
    return tools->dump();
  }

  Conversation openai(const Json& record) const {
    const Json& list = list_in(record, "messages");
    bool answered = false;
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string of = c10::str("message ", i + 1);
      answered = text_in(list[i], "role", of) == "assistant" || answered;
      check_content(list[i], of);
      if (list[i].contains("weight") && list[i]["weight"] != 1) {
        records_.refuse(of +
                        " has a \"weight\" that is not 1, which is not "
                        "supported");
      }
    }
    check_answered(answered);
    return {.messages = list.dump(), .tools = tools_of(record)};
  }

  Conversation sharegpt(const Json& record) const {
    Json messages = Json::array();
    if (record.contains("system")) {
      messages.push_back(
          message("system", text_in(record, "system", "the record")));
    }
    bool answered = false;
    const Json& list = list_in(record, "conversations");
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string of = c10::str("message ", i + 1);
      const std::string& from = text_in(list[i], "from", of);
      const auto role = speakers().find(from);
      if (role == speakers().end()) {
        records_.refuse(c10::str(of, " is from ", in_quotes(from),
                                 ", who is none of system, human, gpt, tool"));
      }
      answered = role->second == "assistant" || answered;
      messages.push_back(message(role->second, text_in(list[i], "value", of)));
    }
    check_answered(answered);
    return {.messages = messages.dump(), .tools = tools_of(record)};
  }

  Conversation pair(const Json& record,
                    const std::array<std::string, 2>& keys) const {
    Conversation::Pair texts{text_in(record, keys[0], "the record"),
                             text_in(record, keys[1], "the record")};
    // What it is about, as in Alpaca's data and in Dolly's.
    for (const char* key : {"input", "context"}) {
      const auto about = record.find(key);
      if (is_about_more(keys[0]) && about != record.end() &&
          about->is_string() && !about->get_ref<const std::string&>().empty()) {
        texts.prompt += "\n\n" + about->get_ref<const std::string&>();
      }
    }
    if (texts.answer.empty()) {
      records_.refuse(c10::str(in_quotes(keys[1]),
                               " is empty: there is nothing "
                               "to learn"));
    }
    const Json messages = {message("user", texts.prompt),
                           message("assistant", texts.answer)};
    return {.messages = messages.dump(), .tools = "", .pair = std::move(texts)};
  }

  static Json message(const std::string& role, const std::string& content) {
    Json message = Json::object();
    message["role"] = role;
    message["content"] = content;
    return message;
  }

  const JsonRecords& records_;
  const std::vector<std::string>& pair_;
};

}  // namespace

struct Conversations::Impl {
  Impl(const std::string& path, std::vector<std::string> keys)
      : records(path, kExample), pair(std::move(keys)) {}

  JsonRecords records;  // stays where it is: its reader points into it
  std::vector<std::string> pair;
};

Conversations::Conversations(const std::string& path,
                             std::vector<std::string> pair)
    : impl_(std::make_unique<Impl>(path, std::move(pair))) {}
Conversations::~Conversations() = default;
Conversations::Conversations(Conversations&&) noexcept = default;

std::optional<Conversation> Conversations::next() {
  if (!impl_->records.next()) return std::nullopt;
  return Reader(impl_->records, impl_->pair).read();
}

std::string Conversations::place() const { return impl_->records.place(); }

void Conversations::refuse(const std::string& what) const {
  impl_->records.refuse(what);
}

uint64_t Conversations::consumed() const { return impl_->records.consumed(); }

bool has_conversations(const std::string& path,
                       const std::vector<std::string>& pair) {
  JsonRecords records(path, kExample);
  return records.next() && is_conversation(records.record(), pair);
}

}  // namespace tessera::data
