#include "tessera/core/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"

namespace tessera::config {
namespace {

struct Inner {
  int64_t depth = 0;
  void declare(Section& section) {
    section.key("depth", depth, "how deep").at_least(0).at_most(9);
  }
};

struct Outer {
  bool flag = false;
  int64_t count = 3;
  double rate = 0.5;
  std::string word = "cat";
  std::string free = "";
  std::vector<std::string> words;
  std::vector<double> numbers = {0.9, 0.95};
  std::vector<int64_t> sizes;
  Inner inner;
  void declare(Section& section) {
    section.key("flag", flag, "on or off");
    section.key("count", count, "how many").at_least(1).at_most(1000);
    section.key("rate", rate, "how fast").more_than(0).at_most(1);
    section.key("word", word, "an animal").one_of({"cat", "dog"});
    section.key("free", free, "any text");
    section.key("words", words, "some texts");
    section.key("numbers", numbers, "two").check([](const Value& value) {
      return std::get<std::vector<double>>(value).size() == 2
                 ? ""
                 : "there must be two";
    });
    section.key("sizes", sizes, "some sizes");
    section.section("inner", inner, "inside");
  }
};

struct Root {
  Outer outer;
  Section section;
  Root() { section.section("outer", outer, "the outer section"); }
  Provenance resolve(const std::string& text,
                     const std::vector<Override>& overrides = {}) {
    return config::resolve(section, text, "f", overrides);
  }
};

std::string refusal(const std::string& text,
                    const std::vector<Override>& overrides = {}) {
  Root root;
  try {
    root.resolve(text, overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return error.what_without_backtrace();
  }
  return "";
}

// `body` stands in the section outer, from column 12 on.
std::string refusal_in(const std::string& body) {
  return refusal("{\"outer\": {" + body + "}}");
}

TEST(Config, SetsEveryTypeAndTellsWhereItCameFrom) {
  Root root;
  const auto origins =
      root.resolve(R"({ // a comment
  "$schema": "x",
  "outer": {
    "flag": true, "count": 7, "rate": 1, "word": "dog",
    "words": "one", "numbers": [0, 1], "sizes": [-1, 2],
    "inner": {"depth": 4}
  }
})",
                   {{"outer.count", "9", "--set outer.count=9"},
                    {"outer.free", "12", "--outer.free=12"}});
  EXPECT_TRUE(root.outer.flag);
  EXPECT_EQ(root.outer.count, 9);
  EXPECT_EQ(root.outer.rate, 1.0);
  EXPECT_EQ(root.outer.word, "dog");
  EXPECT_EQ(root.outer.free, "12");
  EXPECT_EQ(root.outer.words, std::vector<std::string>{"one"});
  EXPECT_EQ(root.outer.numbers, (std::vector<double>{0, 1}));
  EXPECT_EQ(root.outer.sizes, (std::vector<int64_t>{-1, 2}));
  EXPECT_EQ(root.outer.inner.depth, 4);
  EXPECT_EQ(origins.at("outer.count"), "--set outer.count=9");
  EXPECT_EQ(origins.at("outer.word"), "f:4:50");
  EXPECT_EQ(origins.at("outer.inner.depth"), "f:6:24");
  EXPECT_EQ(origins.at("outer.free"), "--outer.free=12");
}

struct Refused {
  const char* body;
  const char* message;
};

class RefusedKey : public ::testing::TestWithParam<Refused> {};

TEST_P(RefusedKey, NamesPlaceValueRuleAndWayOut) {
  EXPECT_EQ(refusal_in(GetParam().body), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Table, RefusedKey,
    ::testing::Values(
        Refused{"\"cuont\": 1",
                "f:1:12: unknown key \"outer.cuont\". Did you mean "
                "\"outer.count\"?"},
        Refused{"\"\": 1",
                "f:1:12: unknown key \"outer.\". 'tessera schema' lists all "
                "keys."},
        Refused{
            "\"inner.depth\": 1",
            "f:1:12: unknown key \"outer.inner.depth\". In a file a section "
            "is an object, not part of a name."},
        Refused{"\"depth\": 1",
                "f:1:12: unknown key \"outer.depth\". Did you mean "
                "\"outer.inner.depth\"?"},
        Refused{"\"inner\": {\"dept\": 1}",
                "f:1:22: unknown key \"outer.inner.dept\". Did you mean "
                "\"outer.inner.depth\"?"},
        Refused{"\"inner\": 3",
                "f:1:21: outer.inner is a section: expected an object, got 3."},
        Refused{"\"count\": 1, \"count\": 2",
                "f:1:24: duplicate key \"count\". Remove one of the two."},
        Refused{"\"flag\": 1",
                "f:1:20: outer.flag: expected true or false, got 1."},
        Refused{"\"flag\": \"true\"",
                "f:1:20: outer.flag: expected true or false, got \"true\"."},
        Refused{"\"flag\": null",
                "f:1:20: outer.flag: expected true or false, got null."},
        Refused{"\"count\": 2.0",
                "f:1:21: outer.count: expected a whole number of 64 bits, got "
                "2.0."},
        Refused{"\"count\": 2.9",
                "f:1:21: outer.count: expected a whole number of 64 bits, got "
                "2.9."},
        Refused{"\"count\": \"2\"",
                "f:1:21: outer.count: expected a whole number of 64 bits, got "
                "\"2\"."},
        Refused{"\"count\": true",
                "f:1:21: outer.count: expected a whole number of 64 bits, got "
                "true."},
        Refused{"\"count\": [1]",
                "f:1:21: outer.count: expected a whole number of 64 bits, got "
                "[1]."},
        Refused{"\"count\": 9223372036854775808",
                "f:1:21: outer.count: expected a whole number of 64 bits, got "
                "9223372036854775808."},
        Refused{"\"count\": 18446744073709551617",
                "f:1:21: outer.count: expected a whole number of 64 bits, got "
                "1.8446744073709552e+19."},
        Refused{"\"count\": 0",
                "f:1:21: outer.count is 0: it must be at least 1."},
        Refused{"\"count\": -1",
                "f:1:21: outer.count is -1: it must be at least 1."},
        Refused{"\"count\": 1001",
                "f:1:21: outer.count is 1001: it must be at most 1000."},
        Refused{"\"rate\": 0",
                "f:1:20: outer.rate is 0.0: it must be more than 0."},
        Refused{"\"rate\": 1.5",
                "f:1:20: outer.rate is 1.5: it must be at most 1."},
        Refused{"\"rate\": \"0.5\"",
                "f:1:20: outer.rate: expected a number, got \"0.5\"."},
        Refused{"\"word\": \"dgo\"",
                "f:1:20: outer.word is \"dgo\": it is none of cat, dog. Did "
                "you mean \"dog\"?"},
        Refused{"\"word\": \"elephant\"",
                "f:1:20: outer.word is \"elephant\": it is none of cat, dog."},
        Refused{"\"free\": \"a\\u0000b\"",
                "f:1:20: outer.free is \"a\\u0000b\": it must not hold a zero "
                "byte."},
        Refused{"\"words\": [1]",
                "f:1:21: outer.words: expected a list of strings, got [1]."},
        Refused{"\"words\": {}",
                "f:1:21: outer.words: expected a list of strings, got {}."},
        Refused{"\"numbers\": [0.5]",
                "f:1:23: outer.numbers is [0.5]: there must be two."},
        Refused{"\"numbers\": 0.5",
                "f:1:23: outer.numbers: expected a list of numbers, got 0.5."},
        Refused{"\"sizes\": [1.5]",
                "f:1:21: outer.sizes: expected a list of whole numbers, got "
                "[1.5]."}));

TEST(Config, RefusesWhatIsNoObjectOfSections) {
  EXPECT_EQ(refusal("[]"),
            "f:1:1: expected an object of sections, as {\"run\": {}}.");
  EXPECT_EQ(refusal("{\"count\": 1}"),
            "f:1:2: unknown key \"count\". Did you mean \"outer.count\"?");
  EXPECT_EQ(refusal("{\"outre\": {}}"),
            "f:1:2: unknown key \"outre\". Did you mean \"outer\"?");
  EXPECT_EQ(refusal("{\"outer\": {\"$schema\": \"\"}}"),
            "f:1:12: unknown key \"outer.$schema\". 'tessera schema' lists all "
            "keys.");
}

TEST(Config, RefusesWhatIsTooLongAtOnce) {
  const std::string long_key(1 << 20, 'k');
  const auto message = refusal_in("\"" + long_key + "\": 1");
  EXPECT_LT(message.size(), 200);
  EXPECT_NE(message.find("unknown key"), std::string::npos);
  EXPECT_NE(refusal("{}" + std::string(4 << 20, ' ')).find("at most 4194304"),
            std::string::npos);
  EXPECT_LT(refusal_in("\"count\": \"" + long_key + "\"").size(), 300);
}

TEST(Config, Overrides) {
  const auto with = [](const std::string& key, const std::string& value) {
    return refusal("{}", {{key, value, "--" + key + "=" + value}});
  };
  EXPECT_EQ(with("outer.count", "5"), "");
  EXPECT_EQ(with("outer.words", "[\"a\", \"b\"]"), "");
  EXPECT_EQ(with("outer.words", "a*.txt"), "");
  EXPECT_EQ(with("outer.count", "five"),
            "--outer.count=five: outer.count: expected a whole number of 64 "
            "bits, got \"five\".");
  EXPECT_EQ(with("outer.count", "0"),
            "--outer.count=0: outer.count is 0: it must be at least 1.");
  EXPECT_EQ(with("count", "5"),
            "--count=5: unknown key \"count\". Did you mean \"outer.count\"?");
  EXPECT_EQ(with("outer.cout", "5"),
            "--outer.cout=5: unknown key \"outer.cout\". Did you mean "
            "\"outer.count\"?");
  EXPECT_EQ(with("outer", "5"),
            "--outer=5: \"outer\" is a section. Set one of its keys, as "
            "outer.flag.");
}

TEST(Config, AListIsWrittenWithCommasOrAsJson) {
  const auto words = [](const std::string& value) {
    Root root;
    root.resolve("{}", {{"outer.words", value, "--w"}});
    return root.outer.words;
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(words("a.txt,b.txt"), (Words{"a.txt", "b.txt"}));
  EXPECT_EQ(words("[\"a,b\", \"c\"]"), (Words{"a,b", "c"}));
  EXPECT_EQ(words("\"a,b\""), (Words{"a,b"}));
  EXPECT_EQ(words("12"), (Words{"12"}));
  Root root;
  root.resolve("{}", {{"outer.numbers", "1,0.5", "--n"},
                      {"outer.sizes", "3", "--s"},
                      {"outer.free", "a,b", "--f"}});
  EXPECT_EQ(root.outer.numbers, (std::vector<double>{1, 0.5}));
  EXPECT_EQ(root.outer.sizes, std::vector<int64_t>{3});
  EXPECT_EQ(root.outer.free, "a,b");
  for (const char* value : {"a,,b", "a,", ",a"}) {
    EXPECT_THAT(refusal("{}", {{"outer.words", value, "--w"}}),
                ::testing::HasSubstr("nothing between two commas"));
  }
}

TEST(Config, RefusesAFlagThatIsNotUtf8) {
  for (const char* key : {"outer.count", "outer.free", "outer.words"}) {
    EXPECT_EQ(refusal("{}", {{key, "caf\xe9", "--set"}}),
              std::string(key) +
                  ": the value \"caf\xef\xbf\xbd\" on the command line is not "
                  "UTF-8. Write it in UTF-8.");
  }
}

TEST(Config, TheLastValueIsTheOneThatIsChecked) {
  Root root;
  root.resolve("{\"outer\": {\"count\": 0}}",
               {{"outer.count", "8", "--a"}, {"outer.count", "9", "--b"}});
  EXPECT_EQ(root.outer.count, 9);
}

TEST(Config, WhatIsWrittenReadsBackTheSame) {
  Root root;
  root.outer.rate = 0.1 + 0.2;
  root.outer.numbers = {1e-300, 5e-324};
  root.outer.free = "\"\\\n\xc3\xa9";
  root.outer.count = 77;
  root.outer.words = {"a", ""};
  const std::string text = to_json(root.section);
  Root again;
  again.resolve(text);
  EXPECT_EQ(to_json(again.section), text);
  EXPECT_EQ(again.outer.rate, root.outer.rate);
  EXPECT_EQ(again.outer.numbers, root.outer.numbers);
  EXPECT_EQ(again.outer.free, root.outer.free);
}

TEST(Config, PrintsValuesWithTheirOrigins) {
  Root root;
  const auto origins = root.resolve("{\"outer\": {\"count\": 5}}");
  const std::string table = print(root.section, origins);
  EXPECT_NE(table.find("outer.count        5           f:1:21\n"),
            std::string::npos)
      << table;
  EXPECT_NE(table.find("outer.inner.depth  0           default\n"),
            std::string::npos)
      << table;
}

TEST(Config, SchemaSaysWhatResolveAccepts) {
  Root root;
  using tessera::detail::Json;
  const Json schema =
      tessera::detail::parse_json(config::schema(root.section), "schema");
  EXPECT_EQ(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
  EXPECT_EQ(schema["additionalProperties"], false);
  const Json& outer = schema["properties"]["outer"];
  EXPECT_EQ(outer["additionalProperties"], false);
  EXPECT_EQ(outer["description"], "the outer section");
  const Json& keys = outer["properties"];
  EXPECT_EQ(keys["count"].dump(),
            R"({"type":"integer","description":"how many","default":3,)"
            R"("minimum":1,"maximum":1000})");
  EXPECT_EQ(keys["rate"]["exclusiveMinimum"], 0.0);
  EXPECT_EQ(keys["word"]["enum"].dump(), R"(["cat","dog"])");
  EXPECT_EQ(keys["words"].contains("anyOf"), true);
}

TEST(Config, ManualListsEveryKey) {
  Root root;
  const std::string text = manual(root.section);
  for (const char* part :
       {"## outer\n", "`outer.count` | `3` | how many | at least 1, at most ",
        "## outer.inner\n", "one of cat, dog"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

struct Animal {
  std::vector<std::string> names;
  double weight = 1;
  void declare(Section& section) {
    section.key("names", names, "what it is called");
    section.key("weight", weight, "in kg").more_than(0);
  }
};

struct Zoo {
  std::vector<Animal> animals;
  Section section;
  Zoo() { section.objects("animals", animals, "that live here"); }
  std::string refusal(const std::string& text,
                      const std::vector<Override>& overrides = {}) {
    try {
      resolve(section, text, "f", overrides);
    } catch (const Error& error) {
      return message_of(error);
    }
    return "";
  }
};

TEST(Config, ListsOfObjects) {
  Zoo zoo;
  EXPECT_EQ(zoo.refusal(R"({"animals": [{"names": ["a", "b"], "weight": 2},
                                        {"names": "c"}]})"),
            "");
  ASSERT_EQ(zoo.animals.size(), 2U);
  EXPECT_EQ(zoo.animals[0].names, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(zoo.animals[0].weight, 2);
  EXPECT_EQ(zoo.animals[1].names, std::vector<std::string>{"c"});
  EXPECT_EQ(zoo.animals[1].weight, 1);
  Zoo again;
  EXPECT_EQ(again.refusal(to_json(zoo.section)), "");
  EXPECT_EQ(to_json(again.section), to_json(zoo.section));
  // One object alone, and from the command line.
  EXPECT_EQ(zoo.refusal("{}", {{"animals", R"({"weight": 5})", "--animals"}}),
            "");
  ASSERT_EQ(zoo.animals.size(), 1U);
  EXPECT_EQ(zoo.animals[0].weight, 5);
}

TEST(Config, WhatIsWrongInAListOfObjectsIsNamed) {
  using ::testing::HasSubstr;
  Zoo zoo;
  EXPECT_THAT(zoo.refusal(R"({"animals": [{}, {"weigh": 2}]})"),
              HasSubstr("f:1:19: unknown key \"animals[1].weigh\". Did you "
                        "mean \"animals[1].weight\"?"));
  EXPECT_THAT(zoo.refusal(R"({"animals": [{"weight": 0}]})"),
              HasSubstr("animals[0].weight is 0.0: it must be more than 0"));
  EXPECT_THAT(zoo.refusal(R"({"animals": [{"weight": "x"}]})"),
              HasSubstr("animals[0].weight: expected a number"));
  EXPECT_THAT(zoo.refusal(R"({"animals": [3]})"),
              HasSubstr("animals[0]: expected an object, got 3"));
  EXPECT_THAT(zoo.refusal("{}", {{"animals", "cats", "--animals"}}),
              HasSubstr("--animals: animals[0]: expected an object"));
}

TEST(Config, ListsOfObjectsAreTold) {
  Zoo zoo;
  const auto origins = resolve(zoo.section, R"({"animals": [{}]})", "f", {});
  EXPECT_THAT(
      print(zoo.section, origins),
      ::testing::HasSubstr(R"(animals  [{"names":[],"weight":1.0}]  f:1:13)"));
  using tessera::detail::Json;
  const Json schema =
      tessera::detail::parse_json(config::schema(zoo.section), "schema");
  const Json& list = schema["properties"]["animals"];
  EXPECT_EQ(list["type"], "array");
  EXPECT_EQ(list["items"]["additionalProperties"], false);
  EXPECT_EQ(list["items"]["properties"]["weight"]["exclusiveMinimum"], 0);
  EXPECT_THAT(manual(zoo.section), ::testing::HasSubstr("weight (1.0), in kg"));
}

TEST(Nearest, OfWords) {
  const std::vector<std::string> words = {"train", "eval", "tokenize", "lr"};
  EXPECT_EQ(nearest("trani", words), "train");
  EXPECT_EQ(nearest("tokenise", words), "tokenize");
  EXPECT_EQ(nearest("lrr", words), "lr");
  EXPECT_EQ(nearest("xyzzy", words), std::nullopt);
  EXPECT_EQ(nearest("", words), std::nullopt);
  EXPECT_EQ(nearest("train", {}), std::nullopt);
}

}  // namespace
}  // namespace tessera::config
