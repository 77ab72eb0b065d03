#include "tessera/data/chat_template.h"

#include <filesystem>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/detail/jinja/json.h"
#include "tessera/data/detail/jinja/template.h"
#include "tessera/data/detail/tokenizer_config.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;
using tessera::detail::Json;

// Longer than any; what is longer is no template.
constexpr uint64_t kLongestTemplate = uint64_t{4} << 20;

// One template, or a list of them by names.
std::string source_in(const Json& entry, const std::string& name) {
  if (entry.is_string()) return name == "default" ? entry : Json("");
  if (!entry.is_array()) return "";
  for (const Json& item : entry) {
    if (item.value("name", "") == name) return item.value("template", "");
  }
  return "";
}

// Reasoning under the names that templates read, as transformers gives it.
jinja::Value with_reasoning(const jinja::Value& message) {
  if (message.dict() == nullptr) return message;
  for (const char* key : {"reasoning_content", "thinking", "reasoning"}) {
    const jinja::Value* reasoning = message.dict()->named(key);
    if (reasoning == nullptr || reasoning->is_none()) continue;
    jinja::Dict dict;
    dict.set("thinking", *reasoning);
    for (const auto& [name, value] : message.dict()->items) {
      dict.set(name, value);
    }
    dict.set("reasoning_content", *reasoning);
    return dict;
  }
  return message;
}

std::vector<jinja::Value> messages_of(std::string_view json) {
  const jinja::Value given = jinja::parse_json(json);
  if (given.sequence() == nullptr) throw jinja::Failure("messages are no list");
  std::vector<jinja::Value> messages;
  for (const jinja::Value& message : given.sequence()->items) {
    messages.push_back(with_reasoning(message));
  }
  return messages;
}

// Sets what a JSON object says; "" says nothing.
void add_variables(const std::string& json, jinja::Dict& variables) {
  if (json.empty()) return;
  const jinja::Value given = jinja::parse_json(json);
  if (given.dict() == nullptr) throw jinja::Failure("variables are no object");
  for (const auto& [name, value] : given.dict()->items) {
    variables.set(name, value);
  }
}

}  // namespace

struct ChatTemplate::Impl {
  std::string name;
  std::string source;
  SpecialTokens tokens;
  jinja::Template plain;
  std::optional<jinja::Template> with_tools = {};  // where it is another one

  const jinja::Template& of(bool has_tools) const {
    return has_tools && with_tools ? *with_tools : plain;
  }
};

namespace {

jinja::Template parse(std::string_view source, const std::string& name) {
  TS_CHECK_CONFIG(detail::find_invalid_utf8(source) == std::string_view::npos,
                  name, ": the chat template is not UTF-8.");
  try {
    return jinja::Template(source);
  } catch (const jinja::Failure& failure) {
    TS_CHECK_CONFIG(false, name, ": the chat template, ", failure.what(),
                    ". Give one without it.");
  }
}

}  // namespace

ChatTemplate::ChatTemplate(std::string_view source, const std::string& name,
                           SpecialTokens tokens)
    : impl_(std::make_shared<const Impl>(Impl{
          name, std::string(source), std::move(tokens), parse(source, name)})) {
}

template <typename Body>
auto ChatTemplate::failing(const Body& body) const {
  try {
    return body();
  } catch (const jinja::Failure& failure) {
    TS_CHECK_CONFIG(false, impl_->name, ": the chat template, ", failure.what(),
                    ".");
  }
}

ChatTemplate::ChatTemplate(std::shared_ptr<const Impl> impl)
    : impl_(std::move(impl)) {}

std::optional<ChatTemplate> ChatTemplate::find(const std::string& tokenizer) {
  if (tokenizer.empty()) return std::nullopt;
  const fs::path folder = detail::tokenizer_folder(tokenizer);
  const Json config = detail::read_tokenizer_config(tokenizer);
  const fs::path file = folder / "chat_template.jinja";
  if (fs::exists(file)) return read(file.string(), tokenizer);
  if (!config.contains("chat_template")) return std::nullopt;
  const Json& entry = config["chat_template"];
  const std::string source = source_in(entry, "default");
  if (source.empty()) return std::nullopt;
  const std::string name = (folder / detail::kTokenizerConfig).string();
  Impl impl{name, source, detail::special_tokens_in(config),
            parse(source, name)};
  const std::string with_tools = source_in(entry, "tool_use");
  if (!with_tools.empty()) {
    impl.with_tools = parse(with_tools, name);
    impl.source += with_tools;
  }
  return ChatTemplate(std::make_shared<const Impl>(std::move(impl)));
}

ChatTemplate ChatTemplate::read(const std::string& path,
                                const std::string& tokenizer) {
  return {read_file(path, kLongestTemplate), path,
          special_tokens_of(tokenizer)};
}

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages,
                                 const ChatOptions& options) const {
  Json list = Json::array();
  for (const ChatMessage& message : messages) {
    list.push_back({{"role", message.role}, {"content", message.content}});
  }
  return render_json(list.dump(-1, ' ', false, Json::error_handler_t::replace),
                     options)
      .text;
}

struct ReadMessages::Impl {
  std::vector<jinja::Value> messages;
  jinja::Dict variables;
  bool has_tools = false;
  int64_t bytes = 0;
};

size_t ReadMessages::size() const { return impl_->messages.size(); }

std::string ReadMessages::role(size_t message) const {
  const jinja::Dict* dict = impl_->messages[message].dict();
  const jinja::Value* role = dict == nullptr ? nullptr : dict->named("role");
  return role == nullptr || role->text() == nullptr ? "" : role->text()->text;
}

ReadMessages ChatTemplate::read_messages(std::string_view messages,
                                         const ChatOptions& options) const {
  return failing([&] {
    auto read = std::make_shared<ReadMessages::Impl>();
    jinja::Dict& variables = read->variables;
    for (const auto& [key, token] : impl_->tokens) variables.set(key, token);
    add_variables(options.variables, variables);
    read->messages = messages_of(messages);
    read->has_tools = !options.tools.empty();
    variables.set("tools", read->has_tools ? jinja::parse_json(options.tools)
                                           : jinja::Value(jinja::None{}));
    variables.set("documents", jinja::None{});
    read->bytes = std::ssize(messages) + std::ssize(options.tools) +
                  std::ssize(options.variables);
    ReadMessages result;
    result.impl_ = std::move(read);
    return result;
  });
}

RenderedChat ChatTemplate::render_first(
    const ReadMessages& messages, size_t count, bool add_generation_prompt,
    const std::optional<std::string>& last_content) const {
  return failing([&]() -> RenderedChat {
    const ReadMessages::Impl& read = *messages.impl_;
    jinja::Dict variables = read.variables;
    const auto begin = read.messages.begin();
    std::vector<jinja::Value> first(begin, begin + static_cast<int64_t>(count));
    if (last_content) {
      jinja::Dict last = *first.back().dict();
      last.set("content", *last_content);
      first.back() = std::move(last);
    }
    variables.set("messages", std::move(first));
    variables.set("add_generation_prompt", add_generation_prompt);
    jinja::Rendered rendered =
        impl_->of(read.has_tools)
            .render(variables, jinja::Limits::for_input(read.bytes));
    return {std::move(rendered.text), std::move(rendered.answers)};
  });
}

RenderedChat ChatTemplate::render_json(std::string_view messages,
                                       const ChatOptions& options) const {
  const ReadMessages read = read_messages(messages, options);
  return render_first(read, read.size(), options.add_generation_prompt);
}

bool ChatTemplate::marks_answers(bool has_tools) const {
  return impl_->of(has_tools).marks_answers();
}

const std::string& ChatTemplate::name() const { return impl_->name; }
const std::string& ChatTemplate::source() const { return impl_->source; }

}  // namespace tessera::data
