#include "tessera/data/chat_encoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/conversation.h"
#include "tessera/data/tokenizer_trainer.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ChatData : public ::testing::Test {
 protected:
  ChatData()
      : tokenizer_(train_tokenizer(
            {"some words to learn from, and some more"},
            {.vocab_size = 270, .special_tokens = {"<|end|>", "</s>"}})) {}

  std::string write(const std::string& lines) {
    write_file_atomic(folder_.file("chats.jsonl"), lines);
    return folder_.file("chats.jsonl");
  }
  Conversation read(std::string line) {
    std::ranges::replace(line, '\n', ' ');
    return *Conversations(write(line), pair_).next();
  }
  std::string refused(const std::string& lines) {
    try {
      Conversations conversations(write(lines), pair_);
      while (conversations.next()) {
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      return error.what_without_backtrace();
    }
    return "nothing was refused";
  }
  // What the answers of each list are, as text, between the rest in brackets.
  std::vector<std::string> encoded(const std::string& line,
                                   std::optional<std::string> source,
                                   int64_t max_tokens = INT64_MAX) {
    std::optional<ChatTemplate> chat;
    if (source) chat.emplace(*source, "test");
    return encoded_by(chat, line, max_tokens);
  }
  std::vector<std::string> encoded_by(const std::optional<ChatTemplate>& chat,
                                      const std::string& line,
                                      int64_t max_tokens = INT64_MAX) {
    const ChatEncoder encoder(tokenizer_, chat, tokenizer_.end_of_text());
    std::vector<std::string> texts;
    for (const ChatTokens& tokens : encoder.encode(read(line), max_tokens)) {
      std::string text;
      bool answer = false;
      for (size_t i = 0; i < tokens.ids.size(); ++i) {
        const int64_t id = tokens.ids[i];
        if (tokens.answers[i] != answer) text += answer ? "]" : "[";
        answer = tokens.answers[i];
        text += tokenizer_.decode_bytes({&id, 1}, /*special_tokens=*/true);
      }
      texts.push_back(text + (answer ? "]" : ""));
    }
    return texts;
  }

  TemporaryFolder folder_;
  Tokenizer tokenizer_;
  std::vector<std::string> pair_;
};

constexpr const char* kPlain =
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}";

TEST_F(ChatData, ThreeFormsAreRead) {
  const char* messages =
      R"([{"role":"user","content":"q"},{"role":"assistant","content":"r"}])";
  EXPECT_EQ(read(R"({"messages": )" + std::string(messages) + "}").messages,
            messages);
  EXPECT_EQ(read(R"({"conversations": [{"from": "human", "value": "q"},
                                       {"from": "gpt", "value": "r"}]})")
                .messages,
            messages);
  EXPECT_EQ(read(R"({"prompt": "q", "completion": "r"})").messages, messages);
}

TEST_F(ChatData, PairsHaveUsualKeysOrNamedOnes) {
  EXPECT_EQ(read(R"({"question": "q", "answer": "r"})").pair->answer, "r");
  EXPECT_EQ(read(R"({"instruction": "do", "context": "it", "response": "r"})")
                .pair->prompt,
            "do\n\nit");
  EXPECT_EQ(read(R"({"prompt": "do", "context": "it", "response": "r"})")
                .pair->prompt,
            "do");
  EXPECT_EQ(read(R"({"instruction": "do", "input": "it", "output": "r"})")
                .pair->prompt,
            "do\n\nit");
  pair_ = {"a", "b"};
  EXPECT_EQ(read(R"({"a": "q", "b": "r", "messages": 3})").pair->prompt, "q");
  EXPECT_THAT(refused(R"({"prompt": "q", "completion": "r"})"),
              HasSubstr("has not both \"a\" and \"b\", which data.pair names"));
}

TEST_F(ChatData, BadRecordsAreNamed) {
  const std::string good = R"({"prompt": "q", "completion": "r"})"
                           "\n";
  EXPECT_THAT(refused(good + R"({"text": "x"})"),
              AllOf(HasSubstr("chats.jsonl:2"), HasSubstr("no conversation")));
  EXPECT_THAT(refused(good + R"({"messages": []})"),
              HasSubstr("\"messages\" is no list of messages"));
  EXPECT_THAT(refused(R"({"messages": [{"content": "x"}]})"),
              HasSubstr("message 1 has no text \"role\""));
  EXPECT_THAT(refused(R"({"messages": [{"role": "assistant"}]})"),
              HasSubstr("message 1 has no text \"content\""));
  EXPECT_THAT(refused(R"({"messages": [{"role": "user", "content": "x"}]})"),
              HasSubstr("no message is of the assistant"));
  EXPECT_THAT(
      refused(R"({"conversations": [{"from": "cat", "value": "meow"}]})"),
      HasSubstr("message 1 is from \"cat\""));
  EXPECT_THAT(refused(R"({"prompt": "q", "completion": 3})"),
              HasSubstr("has no text \"completion\""));
  EXPECT_THAT(refused(R"({"prompt": "q", "completion": ""})"),
              HasSubstr("nothing to learn"));
}

TEST_F(ChatData, ConversationsAreTold) {
  EXPECT_TRUE(has_conversations(write(R"({"question": "", "answer": ""})")));
  EXPECT_TRUE(has_conversations(write(R"({"messages": 1})")));
  EXPECT_FALSE(has_conversations(write(R"({"text": "x"})")));
  EXPECT_FALSE(has_conversations(write("")));
}

TEST_F(ChatData, AnswersAreWhatFollowsThePrompt) {
  EXPECT_THAT(encoded(R"({"messages": [{"role": "user", "content": "q"},
                               {"role": "assistant", "content": "one"},
                               {"role": "user", "content": "p"},
                               {"role": "assistant", "content": "two"}]})",
                      kPlain),
              ElementsAre("u:q<|end|>a:[one<|end|>]u:p<|end|>a:[two<|end|>]"));
}

TEST_F(ChatData, AnAnswerThatIsRewrittenLaterHasAListOfItsOwn) {
  const std::string source =
      "{% for m in messages %}{{ m.role[0] }}:{{ '(hm)' if loop.last and "
      "m.role "
      "== 'assistant' }}{{ m.content }}<|end|>{% endfor %}"
      "{% if add_generation_prompt %}a:{% endif %}";
  EXPECT_THAT(
      encoded(R"({"messages": [{"role": "user", "content": "q"},
                               {"role": "assistant", "content": "one"},
                               {"role": "user", "content": "p"},
                               {"role": "assistant", "content": "two"}]})",
              source),
      ElementsAre("u:q<|end|>a:[(hm)one<|end|>]",
                  "u:q<|end|>a:one<|end|>u:p<|end|>a:[(hm)two<|end|>]"));
}

// What an answer and the end of the prompt, which it goes without, have alike
// by chance is the answer's.
TEST_F(ChatData, AnAnswerMayBeginAsThePromptGoesOn) {
  const std::string source =
      "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>"
      "{% endfor %}{% if add_generation_prompt %}a:<think>\n{% endif %}";
  const auto of = [&](const std::string& answer) {
    return encoded(R"({"messages": [{"role": "user", "content": "q"},
                       {"role": "assistant", "content": ")" +
                       answer + R"("}]})",
                   source);
  };
  EXPECT_THAT(of("<b>x"), ElementsAre("u:q<|end|>a:[<b>x<|end|>]"));
  EXPECT_THAT(of("<think>x"), ElementsAre("u:q<|end|>a:[<think>x<|end|>]"));
  EXPECT_THAT(of(">b>x"), ElementsAre("u:q<|end|>a:[>b>x<|end|>]"));
}

// Where it is cut behind max_tokens, nobody sees that the rest is not there.
TEST_F(ChatData, AnswersFarBehindWhatIsUsedAreLeftOut) {
  std::string chat;
  for (int i = 0; i < 300; ++i) {
    chat += std::string(i > 0 ? "," : "") +
            R"({"role": "user", "content": "q"},
               {"role": "assistant", "content": "answer"})";
  }
  chat = R"({"messages": [)" + chat + "]}";
  const std::string whole = encoded(chat, kPlain).at(0);
  const std::string some = encoded(chat, kPlain, /*max_tokens=*/100).at(0);
  EXPECT_LT(some.size(), whole.size() / 4);
  EXPECT_GT(some.size(), 200);
  EXPECT_TRUE(whole.starts_with(some));
  const std::string rewritten =
      "{% for m in messages %}{{ '!' if loop.last }}{{ m.content }}"
      "{% endfor %}{% if add_generation_prompt %}{% endif %}";
  EXPECT_EQ(encoded(chat, rewritten).size(), 300);
  EXPECT_LT(encoded(chat, rewritten, /*max_tokens=*/100).size(), 100);
}

TEST_F(ChatData, AnswersAreWhatTheTemplateMarks) {
  EXPECT_THAT(encoded(R"({"prompt": "q", "completion": "one"})",
                      "{% for m in messages %}{{ m.role[0] }}:{% generation %}"
                      "{{ m.content if m.role == 'assistant' }}"
                      "{% endgeneration %};{% endfor %}"),
              ElementsAre("u:;a:[one];"));
}

TEST_F(ChatData, OfTwoTemplatesEachMarksAnswersOrNot) {
  const std::string marked =
      "{% for m in messages %}{{ m.role[0] }}:{% generation %}"
      "{{ m.content if m.role == 'assistant' }}{% endgeneration %};"
      "{% endfor %}";
  const std::string messages =
      R"("messages": [{"role": "user", "content": "q"},
                      {"role": "assistant", "content": "one"}]})";
  const std::string plain_text = "u:q<|end|>a:[one<|end|>]";
  const std::string marked_text = "u:;a:[one];";
  for (const bool of_tools : {false, true}) {
    write_file_atomic(
        folder_.file("tokenizer_config.json"),
        R"({"chat_template": [{"name": "default", "template": ")" +
            (of_tools ? kPlain : marked) +
            R"("}, {"name": "tool_use", "template": ")" +
            (of_tools ? marked : kPlain) + "\"}]}");
    const auto chat = ChatTemplate::find(folder_.path().string());
    EXPECT_THAT(encoded_by(chat, "{" + messages),
                ElementsAre(of_tools ? plain_text : marked_text));
    EXPECT_THAT(encoded_by(chat, R"({"tools": [{}], )" + messages),
                ElementsAre(of_tools ? marked_text : plain_text));
  }
}

TEST_F(ChatData, PairsNeedNoTemplateAndChatsDo) {
  EXPECT_THAT(encoded(R"({"prompt": "some", "completion": " more"})", {}),
              ElementsAre("some[ more</s>]"));
  EXPECT_THROW(
      encoded(R"({"messages": [{"role": "assistant", "content": "x"}]})", {}),
      Error);
}

}  // namespace
}  // namespace tessera::data
