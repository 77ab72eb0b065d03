#include "cli/chat_prompt.h"

#include <span>

#include "tessera/core/error.h"
#include "tessera/data/chat_template.h"

namespace tessera::cli {
namespace {

// What follows an answer, as tokens: one alone ends a text.
std::vector<int64_t> end_of_answer(std::vector<data::ChatMessage> messages,
                                   const data::ChatTemplate& form,
                                   const data::Tokenizer& tokenizer) {
  const std::string answer = "answer";
  messages.push_back({"assistant", answer});
  const std::string text = form.render(messages);
  const size_t found = text.rfind(answer);
  if (found == std::string::npos) return {};
  const auto behind = tokenizer.encode(text.substr(found + answer.size()));
  if (behind.empty()) return {};
  // A token without a text of its own: not one that an answer may have.
  const bool special = tokenizer.decode(std::span(behind).first(1)).empty();
  return special ? std::vector{behind.front()} : std::vector<int64_t>{};
}

}  // namespace

ChatPrompt chat_prompt(const std::string& system, const std::string& question,
                       const std::string& folder,
                       const data::Tokenizer& tokenizer) {
  const auto form = data::ChatTemplate::find(folder);
  TS_CHECK_CONFIG(form.has_value(), "--chat: ", folder,
                  " has no chat template (chat_template.jinja, or "
                  "chat_template in tokenizer_config.json). Leave --chat out, "
                  "or give a --tokenizer whose folder has one.");
  std::vector<data::ChatMessage> messages;
  if (!system.empty()) messages.push_back({"system", system});
  messages.push_back({"user", question});
  auto ids =
      tokenizer.encode(form->render(messages, {.add_generation_prompt = true}));
  TS_CHECK_CONFIG(!ids.empty(), "--chat: the chat template ", form->name(),
                  " writes nothing of this prompt. Leave --chat out, or give a "
                  "--tokenizer whose template does.");
  return {.ids = std::move(ids),
          .ends = end_of_answer(messages, *form, tokenizer)};
}

}  // namespace tessera::cli
