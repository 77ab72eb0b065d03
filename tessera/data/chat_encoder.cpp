#include "tessera/data/chat_encoder.h"

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data {
namespace {

using Spans = std::vector<std::pair<size_t, size_t>>;

size_t common_prefix(const std::string& a, const std::string& b) {
  const size_t size = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + static_cast<int64_t>(size),
                       b.begin())
             .first -
         a.begin();
}

// A text that no answer begins with: of private use.
constexpr const char* kOtherAnswer = "\xef\xa3\xbf";

// A prompt may begin what the answer goes without (<think>): the answer is
// what differs. Where its first letters are the prompt's by chance, `other`,
// the same conversation with another answer, shows where it begins.
template <typename Render>
size_t begin_of_answer(const std::string& asked, const std::string& answered,
                       const Render& other) {
  size_t begin = common_prefix(asked, answered);
  if (begin == asked.size()) return begin;
  begin = std::min(begin, common_prefix(answered, other()));
  // At the beginning of a character of UTF-8.
  while (begin > 0 && begin < answered.size() &&
         (static_cast<unsigned char>(answered[begin]) & 0xc0) == 0x80) {
    --begin;
  }
  return begin;
}

// Normalized piece by piece, so that the spans stay where they were.
RenderedChat normalized(const RenderedChat& chat) {
  RenderedChat result;
  size_t at = 0;
  const auto take = [&](size_t end) {
    const std::string_view piece =
        std::string_view(chat.text).substr(at, end - at);
    result.text += detail::normalize_nfc(piece);
    at = end;
    return result.text.size();
  };
  for (const auto& [first, last] : chat.answers) {
    const size_t begin = take(std::max(first, at));
    result.answers.emplace_back(begin, take(std::max(last, at)));
  }
  take(chat.text.size());
  return result;
}

// How far a conversation is of use. Tokens are counted when its text has grown
// by a part, so that all counts together cost no more than a few.
class Reach {
 public:
  explicit Reach(int64_t max_tokens) : max_tokens_(max_tokens) {}

  // No text has more tokens than bytes.
  bool is_asked_at(size_t bytes) {
    const auto size = static_cast<int64_t>(bytes);
    if (size < max_tokens_ || size < counted_ + counted_ / 4) return false;
    counted_ = size;
    return true;
  }
  // The last tokens of a text may be others once it goes on.
  bool ends_before(size_t tokens) const {
    constexpr int64_t kLast = 256;
    return static_cast<int64_t>(tokens) - kLast > max_tokens_;
  }

 private:
  int64_t max_tokens_, counted_ = 0;
};

}  // namespace

ChatEncoder::ChatEncoder(const Tokenizer& tokenizer,
                         std::optional<ChatTemplate> chat_template,
                         std::optional<int64_t> end)
    : tokenizer_(tokenizer), template_(std::move(chat_template)), end_(end) {}

std::vector<ChatTokens> ChatEncoder::encode(const Conversation& conversation,
                                            int64_t max_tokens) const {
  if (!template_) {
    TS_CHECK_CONFIG(conversation.pair.has_value(),
                    "a chat needs a chat template, and the tokenizer has none. "
                    "Name one by data.chat_template.");
    return {encode_pair(*conversation.pair)};
  }
  std::vector<ChatTokens> all;
  if (template_->marks_answers(!conversation.tools.empty())) {
    all.push_back(encode_rendered(template_->render_json(
        conversation.messages, {.tools = conversation.tools})));
    return all;
  }
  for (RenderedChat& chat : render_prefixes(conversation, max_tokens)) {
    all.push_back(encode_rendered(std::move(chat)));
  }
  return all;
}

ChatTokens ChatEncoder::encode_pair(const Conversation::Pair& pair) const {
  ChatTokens tokens;
  const auto add = [&](const std::vector<int64_t>& ids, bool answer) {
    tokens.ids.insert(tokens.ids.end(), ids.begin(), ids.end());
    tokens.answers.resize(tokens.ids.size(), answer);
  };
  add(tokenizer_.spec().before, false);
  add(tokenizer_.encode(pair.prompt), false);
  add(tokenizer_.encode(pair.answer), true);
  if (end_) add({*end_}, true);
  return tokens;
}

// A token counts where one of its bytes is in an answer.
ChatTokens ChatEncoder::encode_rendered(RenderedChat chat) const {
  if (tokenizer_.spec().nfc) chat = normalized(chat);
  const std::vector<int64_t> ids = tokenizer_.encode(chat.text);
  const std::string back =
      tokenizer_.decode_bytes(ids, /*special_tokens=*/true);
  const size_t shift = back.size() - std::min(back.size(), chat.text.size());
  TS_CHECK_CONFIG(
      shift <= 1 && std::string_view(back).substr(shift) == chat.text,
      "the tokenizer changes the text of a conversation, so that "
      "the answers' tokens are not known. Use one that does not.");
  ChatTokens tokens{{ids.begin(), ids.end()}, {}};
  size_t at = 0;
  auto span = chat.answers.begin();
  for (const int64_t id : ids) {
    const size_t begin = at - std::min(at, shift);
    at += tokenizer_.decode_bytes({&id, 1}, /*special_tokens=*/true).size();
    const size_t end = at - std::min(at, shift);
    while (span != chat.answers.end() &&
           (span->second <= begin || span->first == span->second)) {
      ++span;
    }
    tokens.answers.push_back(span != chat.answers.end() && span->first < end);
  }
  return tokens;
}

size_t ChatEncoder::num_tokens(const std::string& text) const {
  const bool nfc = tokenizer_.spec().nfc;
  return tokenizer_.encode(nfc ? detail::normalize_nfc(text) : text).size();
}

std::vector<RenderedChat> ChatEncoder::render_prefixes(
    const Conversation& conversation, int64_t max_tokens) const {
  const ReadMessages messages = template_->read_messages(
      conversation.messages, {.tools = conversation.tools});
  const auto render = [&](size_t count, bool prompt) {
    return template_->render_first(messages, count, prompt).text;
  };
  Reach reach(max_tokens);
  std::vector<RenderedChat> chats;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages.role(i) != "assistant") continue;
    const std::string asked = render(i, /*prompt=*/true);
    if (!chats.empty() && reach.is_asked_at(asked.size()) &&
        reach.ends_before(num_tokens(asked))) {
      break;
    }
    std::string answered = render(i + 1, /*prompt=*/false);
    const size_t begin = begin_of_answer(asked, answered, [&] {
      return template_
          ->render_first(messages, i + 1, /*add_generation_prompt=*/false,
                         kOtherAnswer)
          .text;
    });
    if (begin == answered.size()) continue;
    const bool goes_on =
        !chats.empty() && answered.starts_with(chats.back().text);
    if (!goes_on) chats.emplace_back();
    chats.back().text = std::move(answered);
    chats.back().answers.emplace_back(begin, chats.back().text.size());
  }
  return chats;
}

}  // namespace tessera::data
