#include "tessera/data/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::data {
namespace {

using ::testing::HasSubstr;

std::string rendered(const std::string& source,
                     const std::string& variables = "{}") {
  const ChatTemplate chat(source, "test.jinja", {{"bos_token", "<s>"}});
  return chat.render_json("[]", {.variables = variables}).text;
}

std::string refused(const std::string& source,
                    const std::string& variables = "{}") {
  try {
    rendered(source, variables);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return error.what_without_backtrace();
  }
  return "nothing";
}

TEST(ChatTemplate, Expressions) {
  EXPECT_EQ(rendered("{{ 1 + 2 * 3 ** 2 - -4 }}"), "23");
  EXPECT_EQ(rendered("{{ 7 // -2 }} {{ 7 % -2 }} {{ 7 / 2 }}"), "-4 -1 3.5");
  EXPECT_EQ(rendered("{{ 'a' ~ 1 ~ none ~ true }}"), "a1NoneTrue");
  EXPECT_EQ(rendered("{{ 1 < 2 <= 2 and not 3 in [1, 2] }}"), "True");
  EXPECT_EQ(rendered("{{ 'yes' if x else 'no' }}{{ 'y' if x }}"), "no");
  EXPECT_EQ(rendered("{{ 'one' \"two\" '\\n\\u00e9' }}"), "onetwo\n\u00e9");
  EXPECT_EQ(
      rendered("{{ [1, 2.0, 1e20, '\u00e9\\n', none], (1,), {'a': \"b'\"} }}"),
      "([1, 2.0, 1e+20, '\u00e9\\n', None], (1,), {'a': \"b'\"})");
}

TEST(ChatTemplate, TextIsCountedInCodePoints) {
  const std::string text = R"({"x": "\u00e4\u00f6\u00fc\ud83c\udf0d"})";
  EXPECT_EQ(rendered("{{ x|length }}{{ x[1] }}{{ x[::-1] }}{{ x[-2:] }}", text),
            "4\u00f6\U0001f30d\u00fc\u00f6\u00e4\u00fc\U0001f30d");
  EXPECT_EQ(rendered("[{{ '\\u3000 a\\u00a0\\n'|trim }}]"), "[a]");
  EXPECT_EQ(rendered("{{ x|upper }} {{ 'stra\u00dfe'|upper }}", text),
            "\u00c4\u00d6\u00dc\U0001f30d STRASSE");
}

TEST(ChatTemplate, MethodsFiltersAndTests) {
  EXPECT_EQ(rendered("{{ 'a--b--c'.split('--')[-1] }}{{ ' x '.strip() }}"),
            "cx");
  EXPECT_EQ(rendered("{{ 'a b  c '.split()|join('/') }}"), "a/b/c");
  EXPECT_EQ(rendered("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}"
                     "{% endfor %}"),
            "a1");
  EXPECT_EQ(rendered("{{ {'a': [1, '\u00fc\\u2028', {}]}|tojson }}"),
            "{\"a\": [1, \"\u00fc\u2028\", {}]}");
  EXPECT_EQ(rendered("{{ {'a': [1], 'b': []}|tojson(indent=2) }}"),
            "{\n  \"a\": [\n    1\n  ],\n  \"b\": []\n}");
  EXPECT_EQ(rendered("{{ [3, 1, 2]|sort|map('string')|join(',') }}"), "1,2,3");
  EXPECT_EQ(rendered("{{ [{'r': 'u'}, {'r': 'a'}]|selectattr('r', 'equalto', "
                     "'a')|list|length }}"),
            "1");
  EXPECT_EQ(
      rendered("{{ x is defined }} {{ x is not none }} {{ [] is mapping }}"),
      "False True False");
}

TEST(ChatTemplate, LoopsMacrosAndNamespaces) {
  EXPECT_EQ(rendered("{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}"
                     "{{ ',' if not loop.last }}{% endfor %}"),
            "1/3,2/3,3/3");
  EXPECT_EQ(rendered("{% for i in range(9) if i is odd %}{% if i > 5 %}"
                     "{% break %}{% endif %}{{ i }}{% else %}none{% endfor %}"),
            "135");
  EXPECT_EQ(rendered("{% set n = namespace(x=0) %}{% set y = 1 %}"
                     "{% for i in [5, 6] %}{% set n.x = n.x + i %}"
                     "{% set y = i %}{% endfor %}{{ n.x }} {{ y }}"),
            "11 1");
  EXPECT_EQ(rendered("{% macro m(a, b='x') %}<{{ a }}{{ b }}>{% endmacro %}"
                     "{{ m(1) }}{{ m(b=2, a=3) }}"),
            "<1x><32>");
  EXPECT_EQ(rendered("{% set x %}a{{ 1 }}{% endset %}{{ x|upper }}"), "A1");
  EXPECT_EQ(rendered("{% macro m() %}({{ caller() }}){% endmacro %}"
                     "{% call m() %}in{% endcall %}"),
            "(in)");
}

TEST(ChatTemplate, WhiteSpace) {
  EXPECT_EQ(rendered("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
  EXPECT_EQ(rendered("a \n {%- if true -%} \n b {%+ endif %}"), "ab ");
  EXPECT_EQ(rendered("a\n  {# gone #}\n  {{ 1 }}\n"), "a\n  1");
  EXPECT_EQ(rendered("{% raw %}{{ x }}{% endraw %}"), "{{ x }}");
}

TEST(ChatTemplate, WhatIsNotThereIsRefusedByName) {
  EXPECT_THAT(refused("\n{{ x|frobnicate }}"),
              HasSubstr("test.jinja: the chat template, line 2: the filter "
                        "'frobnicate' is not supported"));
  EXPECT_THAT(refused("{{ x is frobnicated }}"), HasSubstr("'frobnicated'"));
  EXPECT_THAT(refused("{{ x.append(1) }}"), HasSubstr("method 'append'"));
  EXPECT_THAT(refused("{% if false %}{{ lipsum() }}{% endif %}"),
              HasSubstr("function 'lipsum'"));
  EXPECT_THAT(refused("{% include 'x' %}"), HasSubstr("tag 'include'"));
  EXPECT_THAT(refused("{% if x %}"), HasSubstr("'endif' is missing"));
  EXPECT_THAT(refused("{{ 'a }}"), HasSubstr("has no end"));
}

TEST(ChatTemplate, WhatGoesWrongIsToldWithItsLine) {
  EXPECT_THAT(refused("a\n{{ x.y }}"), HasSubstr("line 2: 'x' is undefined"));
  EXPECT_THAT(refused("{{ raise_exception('roles must alternate') }}"),
              HasSubstr("line 1: roles must alternate"));
  EXPECT_THAT(refused("{{ 'a' + 1 }}"), HasSubstr("'str' + 'int'"));
  EXPECT_THAT(refused("{{ range(1000000) }}"), HasSubstr("range"));
  EXPECT_THAT(refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
              HasSubstr("calls itself"));
  EXPECT_THAT(refused("{{ " + std::string(100000, '(') + "1" +
                      std::string(100000, ')') + " }}"),
              HasSubstr("nested too deeply"));
}

TEST(ChatTemplate, WhatUsesTooMuchIsRefused) {
  const std::string doubled =
      "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
      "{% set n.x = n.x + n.x %}{% endfor %}";
  EXPECT_THAT(refused("\n" + doubled),
              HasSubstr("test.jinja: the chat template, line 2: one rendering "
                        "makes more than 512.0 MiB of texts and lists"));
  EXPECT_THAT(refused("{% for i in range(3) %}{% set loop.x = 1 %}"
                      "{% endfor %}"),
              HasSubstr("'loop' is no namespace"));
}

TEST(ChatTemplate, AChainThatIsTooLongIsRefused) {
  std::string chain = "{{ 1", powers = "{{ (-1) ** 3 }} {{ (-1) ** 4 }}";
  for (int i = 0; i < 999; ++i) chain += " + 1";
  EXPECT_EQ(rendered(chain + " }}"), "1000");
  EXPECT_THAT(refused(chain + " + 1 }}"), HasSubstr("too many terms"));
  EXPECT_EQ(rendered(powers), "-1 1");
}

TEST(ChatTemplate, MarksAnswers) {
  const ChatTemplate chat(
      "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }};"
      "{% endgeneration %}{% endfor %}",
      "test");
  EXPECT_TRUE(chat.marks_answers(/*has_tools=*/false));
  EXPECT_TRUE(chat.marks_answers(/*has_tools=*/true));
  const RenderedChat one =
      chat.render_json(R"([{"role": "a", "content": "xy"}])");
  EXPECT_EQ(one.text, "a:xy;");
  using Answers = std::vector<std::pair<size_t, size_t>>;
  EXPECT_EQ(one.answers, (Answers{{2, 5}}));
}

TEST(ChatTemplate, IsFoundInAFolder) {
  const TemporaryFolder folder;
  EXPECT_FALSE(ChatTemplate::find(folder.path().string()).has_value());
  write_file_atomic(folder.file("tokenizer_config.json"),
                    R"({"bos_token": {"content": "<s>"}, "add_bos_token": true,
          "chat_template": [{"name": "default", "template": "{{bos_token}}d"},
                            {"name": "tool_use", "template": "t"}]})");
  const auto found = ChatTemplate::find(folder.file("tokenizer.json"));
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->render({}), "<s>d");
  EXPECT_EQ(found->render({}, {.tools = "[]"}), "t");
  EXPECT_FALSE(found->marks_answers(/*has_tools=*/true));
  write_file_atomic(folder.file("chat_template.jinja"),
                    "{{ messages[0].content }}");
  EXPECT_EQ(
      ChatTemplate::find(folder.path().string())->render({{"user", "h\u00e9"}}),
      "h\u00e9");
  write_file_atomic(folder.file("tokenizer_config.json"), "{");
  EXPECT_THROW(ChatTemplate::find(folder.path().string()), Error);
}

}  // namespace
}  // namespace tessera::data
