#include "tessera/data/detail/jinja/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/data/detail/jinja/json.h"
#include "tessera/data/detail/jinja/template.h"

namespace tessera::data::jinja {
namespace {

using ::testing::HasSubstr;

constexpr Limits kFew{.steps = 100'000, .bytes = 1 << 20};

std::string outcome(const std::string& source, const Limits& limits = kFew) {
  Dict variables;
  variables.set("chars", std::string(10'000, 'a'));
  try {
    return Template(source).render(variables, limits).text;
  } catch (const Failure& failure) {
    return failure.what();
  }
}

std::string grown(const std::string& by) {
  return "{% set n = namespace(x=" + by;
}

TEST(Budget, WhatDoublesIsRefused) {
  for (const std::string by :
       {"n.x + n.x", "n.x ~ n.x", "n.x|join(n.x)", "n.x.join(n.x)",
        "n.x.replace('a', n.x)", "n.x * 3", "(n.x ~ '\\n' * 9)|indent(n.x)"}) {
    EXPECT_THAT(outcome("\n" + grown("'aaaa') %}{% for i in range(90) %}") +
                        "{% set n.x = " + by + " %}{% endfor %}"),
                HasSubstr("line 2: one rendering makes more than 1.0 MiB of "
                          "texts and lists"))
        << by;
  }
  for (const std::string by : {"n.x + n.x", "n.x * 2", "(n.x + [1])[:] * 2"}) {
    EXPECT_THAT(outcome(grown("[1]) %}{% for i in range(90) %}") +
                        "{% set n.x = " + by + " %}{% endfor %}"),
                HasSubstr("one rendering makes more than"))
        << by;
  }
  EXPECT_THAT(outcome(grown("'a') %}{% for i in range(90) %}{% set y %}"
                            "{{ n.x }}{{ n.x }}{% endset %}"
                            "{% set n.x = y %}{% endfor %}")),
              HasSubstr("one rendering makes more than"));
}

TEST(Budget, WhatIsWrittenOutIsRefused) {
  for (const std::string by : {"(n.x, n.x)|string", "[n.x, n.x]|tojson"}) {
    EXPECT_THAT(outcome(grown("'aaaa') %}{% for i in range(90) %}") +
                        "{% set n.x = " + by + " %}{% endfor %}"),
                HasSubstr("one rendering "))
        << by;
  }
}

TEST(Budget, APageThatIsTooLongIsRefused) {
  EXPECT_THAT(outcome("{% for c in chars %}{{ chars }}{% endfor %}"),
              HasSubstr("one rendering makes more than"));
}

TEST(Budget, WhatGoesOnAndOnIsRefused) {
  const std::string loops =
      "{% for i in r %}{% for j in r %}{% for k in r %}{% for l in r %}";
  const std::string ends = "{% endfor %}{% endfor %}{% endfor %}{% endfor %}";
  for (const std::string body : {"", "{% if i == 1 %}{% endif %}"}) {
    EXPECT_THAT(outcome("{% set r = range(99) %}" + loops + body + ends),
                HasSubstr("one rendering takes more than 100000 steps"));
  }
  for (const std::string each : {"'b' in chars", "chars|length", "chars[1]",
                                 "chars.strip()", "chars.find('b')"}) {
    EXPECT_THAT(outcome("{% for c in chars %}{% if " + each +
                        " %}{% endif %}{% endfor %}"),
                HasSubstr("one rendering takes more than"))
        << each;
  }
}

// Where a part of what is looked for is everywhere.
TEST(Budget, WhatIsSoughtCountsToo) {
  const std::string almost = "('a' * 5000 ~ 'b')";
  const std::vector<std::string> searches = {
      "('a' * 20000).rfind(" + almost + ")",
      "('a' * 20000).rsplit(" + almost + ")|length",
      "('a' * 20000).strip('b' * 2000 ~ 'a')|length"};
  for (const std::string& each : searches) {
    EXPECT_THAT(outcome("{{ " + each + " }}"),
                HasSubstr("one rendering takes more than"))
        << each;
  }
  EXPECT_EQ(outcome("{{ " + almost + " in 'a' * 20000 }}"), "False");
  EXPECT_EQ(outcome("{{ 'abcab'.rfind('ab') }} {{ 'abcab'.rfind('') }}"),
            "3 5");
}

// A list that holds itself twice holds its first item 2^n times.
TEST(Budget, SharedItemsCountEachTime) {
  const std::string twice = grown(
      "[1]) %}{% for i in range(60) %}"
      "{% set n.x = [n.x, n.x] %}{% endfor %}");
  for (const std::string use : {"n.x|string", "n.x|tojson",
                                "n.x == [n.x[0], n.x[1]]", "[n.x, n.x]|sort"}) {
    EXPECT_THAT(outcome(twice + "{{ " + use + " }}"),
                HasSubstr("one rendering "))
        << use;
  }
}

TEST(Budget, DepthDoesNotUseUpTheStack) {
  for (const std::string by :
       {"[n.x]", "(n.x,)", "{'a': n.x}", "{'a': {'b': n.x}}"}) {
    EXPECT_THAT(outcome(grown("1) %}{% for i in range(100000) %}") +
                            "{% set n.x = " + by + " %}{% endfor %}",
                        Limits{}),
                HasSubstr("lie more than 500 deep in each other"))
        << by;
  }
  EXPECT_THAT(outcome(grown("1) %}{% for i in range(9999) %}{% for j in "
                            "[n.x, 1] %}{% set n.x = loop %}{% endfor %}"
                            "{% endfor %}"),
                      Limits{}),
              HasSubstr("deep in each other"));
  EXPECT_EQ(outcome(grown("1) %}{% for i in range(100000) %}"
                          "{% set n.x = namespace(x=n.x) %}{% endfor %}") +
                        "done",
                    Limits{}),
            "done");
}

TEST(Budget, FramesOfMacrosCount) {
  const std::string calls =
      "{% macro m() %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}"
      "{% call m() %}x{% endcall %}{% endfor %}";
  EXPECT_THAT(outcome(calls), HasSubstr("one rendering makes more than"));
}

TEST(Budget, AMacroOutlivesItsLoop) {
  EXPECT_EQ(outcome(grown("1) %}{% for i in range(3) %}{% set y = i * 2 %}"
                          "{% macro m() %}{{ y }}{% endmacro %}"
                          "{% if i == 1 %}{% set n.x = m %}{% endif %}"
                          "{% endfor %}{% for i in range(9) %}{% endfor %}"
                          "{% set f = n.x %}{{ f() }}")),
            "2");
}

TEST(Budget, GrowsWithTheInput) {
  EXPECT_GT(Limits::for_input(1000).bytes, Limits{}.bytes);
  EXPECT_GT(Limits::for_input(1000).steps, Limits{}.steps);
}

}  // namespace
}  // namespace tessera::data::jinja
