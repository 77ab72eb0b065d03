#include "tessera/core/detail/json.h"

#include <gtest/gtest.h>

#include <chrono>

namespace tessera::detail {
namespace {

std::string refusal(const std::string& text, const JsonLimits& limits = {}) {
  try {
    parse_json(text, "f", limits);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), limits.exit_code);
    return error.what_without_backtrace();
  }
  return "";
}

struct Hostile {
  const char* text;
  const char* complaint;  // starts with the place
};

class HostileJson : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileJson, IsRefusedWithItsPlace) {
  EXPECT_EQ(refusal(GetParam().text).substr(0, strlen(GetParam().complaint)),
            GetParam().complaint)
      << refusal(GetParam().text);
}

INSTANTIATE_TEST_SUITE_P(
    Table, HostileJson,
    ::testing::Values(
        Hostile{"", "f:1:1: attempting to parse an empty input"},
        Hostile{" \n", "f:2:1: syntax"}, Hostile{"{", "f:1:2: syntax error"},
        Hostile{"}", "f:1:1: syntax"}, Hostile{"[1,]", "f:1:4: syntax error"},
        Hostile{"{\"a\":1,}", "f:1:8: syntax error"},
        Hostile{"[1, \n ]",
                "f:2:2: syntax error: a comma stands before this ']'"},
        Hostile{"{\"a\":1,}", "f:1:8: syntax error: a comma stands before"},
        Hostile{"{,}", "f:1:2: syntax error while parsing object key"},
        Hostile{"\xff\xfe{", "f: is UTF-16 text"},
        Hostile{"\xfe\xff", "f: is UTF-16 text"},
        Hostile{"{\"a\" 1}", "f:1:6: syntax error"},
        Hostile{"{a:1}", "f:1:2: syntax error"},
        Hostile{"{'a':1}", "f:1:2: syntax error"},
        Hostile{"[1] x", "f:1:5: syntax error"},
        Hostile{"[1][2]", "f:1:4: syntax error"},
        Hostile{"nul", "f:1:4: syntax error"},
        Hostile{"NaN", "f:1:1: syntax error"},
        Hostile{"Infinity", "f:1:1: syntax error"},
        Hostile{"-Infinity", "f:1:2: syntax error"},
        Hostile{"[01]", "f:1:3: syntax error"},
        Hostile{"[+1]", "f:1:2: syntax error"},
        Hostile{"[.5]", "f:1:2: syntax error"},
        Hostile{"[1.]", "f:1:4: syntax error"},
        Hostile{"[0x10]", "f:1:3: syntax error"},
        Hostile{"[1e999]", "f:1:6: number overflow"},
        Hostile{"\"a", "f:1:3: syntax error"},
        Hostile{"\"\\x\"", "f:1:3: syntax error"},
        Hostile{"\"\\u12\"", "f:1:6: syntax error"},
        Hostile{"\"\\ud800\"", "f:1:8: syntax error"},
        Hostile{"\"\n\"", "f:1:2: syntax error"},
        Hostile{"\"\xff\"", "f:1:2: syntax error"},
        Hostile{"\"\xc0\xaf\"", "f:1:2: syntax error"},
        Hostile{"\"\xed\xa0\x80\"", "f:1:3: syntax error"},
        Hostile{"// c\n1", "f:1:1: syntax error"},
        Hostile{"{\"a\":1,\n \"a\":2}", "f:2:2: duplicate key \"a\""},
        Hostile{"{\"a\":1,\"\\u0061\":2}", "f:1:8: duplicate key \"a\""},
        Hostile{"{\"q\\\"\":1,\n\n  \"q\\\"\":2}", "f:3:3: duplicate key"},
        Hostile{"[{\"b\":{\"c\":1,\"c\":1}}]", "f:1:14: duplicate key"}));

TEST(Json, RefusesADepthOf65AndReads64) {
  const auto nested = [](int depth, char open, char close) {
    return std::string(depth, open) + std::string(depth, close);
  };
  EXPECT_EQ(refusal(nested(64, '[', ']')), "");
  EXPECT_EQ(refusal(nested(65, '[', ']')), "f:1:65: nested more than 64 deep.");
  EXPECT_NE(refusal(std::string(10'000'000, '[')), "");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_EQ(refusal(objects), "f:1:321: nested more than 64 deep.");
}

TEST(Json, RefusesTooManyBytes) {
  JsonLimits limits{.max_bytes = 10, .exit_code = ExitCode::kConfig};
  EXPECT_EQ(refusal("[1,2,3,4,5]", limits),
            "f: 11 bytes of JSON; at most 10 are read.");
  EXPECT_EQ(refusal("[1,2,3,4]", limits), "");
}

TEST(Json, CommentsWhereTheyAreAllowed) {
  const JsonLimits limits{.comments = true};
  const std::string text = "// top\n{\"a\": /* here */ 1 // end\n}";
  const Json json = parse_json(text, "f", limits);
  EXPECT_EQ(json["a"], 1);
  EXPECT_EQ(place_of(json["a"], text, "f"), "f:2:18");
  EXPECT_EQ(refusal("{\"a\":1, // x \"a\"\n \"a\":2}", limits),
            "f:2:2: duplicate key \"a\". Remove one of the two.");
}

TEST(Json, PlacesOfValuesAndKeys) {
  const std::string text = "{\n  \"a\": [1,\n  {\"b \\\" c\" : -2.5}]\n}";
  const Json json = parse_json(text, "f");
  EXPECT_EQ(place_of(json, text, "f"), "f:1:1");
  EXPECT_EQ(place_of(json["a"], text, "f"), "f:2:8");
  EXPECT_EQ(place_of_key(json["a"], text, "f"), "f:2:3");
  EXPECT_EQ(place_of(json["a"][0], text, "f"), "f:2:9");
  EXPECT_EQ(place_of(json["a"][1]["b \" c"], text, "f"), "f:3:15");
  EXPECT_EQ(place_of_key(json["a"][1]["b \" c"], text, "f"), "f:3:4");
}

TEST(Json, TypedReadsNeverConvert) {
  const Json json = parse_json(
      R"([-1, 2.9, 2.0, 9223372036854775807, 9223372036854775808,
          18446744073709551616, true, "1", null])",
      "f");
  EXPECT_EQ(as_int(json[0], "x"), -1);
  EXPECT_EQ(as_int(json[3], "x"), INT64_MAX);
  for (size_t i : {1, 2, 4, 5, 6, 7, 8}) {
    EXPECT_THROW(as_int(json[i], "x"), Error) << i;
  }
  EXPECT_EQ(as_double(json[0], "x"), -1.0);
  for (size_t i : {6, 7, 8}) EXPECT_THROW(as_double(json[i], "x"), Error) << i;
  EXPECT_TRUE(as_bool(json[6], "x"));
  for (size_t i : {0, 7, 8}) EXPECT_THROW(as_bool(json[i], "x"), Error) << i;
  EXPECT_EQ(as_string(json[7], "x"), "1");
  for (size_t i : {0, 6, 8}) EXPECT_THROW(as_string(json[i], "x"), Error) << i;
}

TEST(Json, ObjectsKeepTheirOrder) {
  std::string text = "{";
  for (int i = 0; i < 50; ++i) {
    text += (i ? ",\"" : "\"") + std::to_string(i * 7919 % 50) +
            "\":" + std::to_string(i);
  }
  text += "}";
  Json json = parse_json(text, "f");
  EXPECT_EQ(json.dump(), text);
  EXPECT_EQ(json.size(), 50);
  EXPECT_EQ(json.at("0"), 0);
  EXPECT_FALSE(json.contains("50"));
  json.erase("0");
  EXPECT_FALSE(json.contains("0"));
  EXPECT_EQ(json.size(), 49);
  json["new"] = 1;
  json["49"] = "changed";
  EXPECT_EQ(json.size(), 50);
  EXPECT_EQ(json["49"], "changed");
  const Json copy = json;
  EXPECT_EQ(copy, json);
  EXPECT_EQ(copy.at("new"), 1);
  json.clear();
  EXPECT_FALSE(json.contains("new"));
  json["new"] = 2;
  EXPECT_EQ(json.dump(), "{\"new\":2}");
}

// A search from the front would take minutes here.
TEST(Json, ALargeVocabularyIsReadAndWritten) {
  Json vocabulary = Json::object();
  for (int i = 0; i < 200'000; ++i) {
    vocabulary["token " + std::to_string(i)] = i;
  }
  const Json again = parse_json(vocabulary.dump(), "f");
  EXPECT_EQ(again.size(), 200'000);
  for (int i = 0; i < 200'000; i += 1000) {
    EXPECT_EQ(again.at("token " + std::to_string(i)), i);
  }
}

TEST(Json, QuotesForMessages) {
  EXPECT_EQ(in_quotes("a\"b\n"), "\"a\\\"b\\n\"");
  EXPECT_EQ(in_quotes("\x1b[2J\xff"), "\"\\u001b[2J\\ufffd\"");
  EXPECT_EQ(in_quotes(std::string(1000, 'x')),
            "\"" + std::string(60, 'x') + "\"...");
}

}  // namespace
}  // namespace tessera::detail
