#include "tessera/data/documents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <fstream>
#include <functional>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string gzip(const std::string& text) {
  std::string packed(compressBound(text.size()) + 64, '\0');
  z_stream stream = {};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + 16, 8, 0), Z_OK);
  std::string input = text;
  stream.next_in = reinterpret_cast<Bytef*>(input.data());
  stream.avail_in = static_cast<uInt>(input.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

// With a checksum, as the program zstd writes it.
std::string zstd(const std::string& text) {
  std::string packed(ZSTD_compressBound(text.size()) + 64, '\0');
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  packed.resize(ZSTD_compress2(context, packed.data(), packed.size(),
                               text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return packed;
}

class DocumentsTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& content) {
    std::ofstream(folder_.file(name), std::ios::binary) << content;
    return folder_.file(name);
  }
  std::vector<std::string> read(const std::string& name,
                                const std::string& content,
                                const DocumentForm& form = {}) {
    Documents documents(write(name, content), form);
    std::vector<std::string> texts;
    while (const auto text = documents.next()) texts.emplace_back(*text);
    EXPECT_EQ(documents.consumed(), content.size());
    return texts;
  }
  Error error_of(const std::string& name, const std::string& content,
                 const DocumentForm& form = {}) {
    try {
      read(name, content, form);
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << name << ": nothing was wrong";
    return Error(ExitCode::kOk, "nothing");
  }
  std::string message(const std::string& name, const std::string& content,
                      const DocumentForm& form = {}) {
    const Error error = error_of(name, content, form);
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return message_of(error);
  }

  TemporaryFolder folder_;
};

constexpr const char* kRecords =
    "{\"text\": \"one\\ntwo\"}\n\n  \r\n{\"id\": 2, \"text\": \"\"}\r\n"
    "{\"text\": \"gr\xc3\xbc\\u00df \\ud83d\\ude00\"}";

TEST_F(DocumentsTest, ARecordIsADocument) {
  const auto expected =
      ElementsAre("one\ntwo", "", "gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80");
  EXPECT_THAT(read("a.jsonl", kRecords), expected);
  EXPECT_THAT(read("a.ndjson", std::string(kRecords) + "\n\n"), expected);
  EXPECT_THAT(read("a.jsonl", "\xef\xbb\xbf" + std::string(kRecords)),
              expected);
  EXPECT_THAT(read("a.jsonl.gz", gzip(kRecords)), expected);
  EXPECT_THAT(read("a.jsonl.zst", zstd(kRecords)), expected);
  EXPECT_THAT(read("a.json", kRecords, {.format = "jsonl"}), expected);
  EXPECT_THAT(read("a.jsonl", "{\"body\": \"x\"}\n", {.field = "body"}),
              ElementsAre("x"));
  EXPECT_THAT(read("a.jsonl", "\n \n"), ElementsAre());
  EXPECT_THAT(read("a.jsonl", kRecords, {.format = "text"}),
              ElementsAre(kRecords));
}

TEST_F(DocumentsTest, JsonIsToldByItsContent) {
  const auto expected =
      ElementsAre("one\ntwo", "", "gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80");
  EXPECT_THAT(read("a.json", kRecords), expected);
  EXPECT_THAT(read("a.json.gz", gzip(kRecords)), expected);
  const std::string list =
      "\xef\xbb\xbf \n[{\"text\": \"one\\ntwo\", \"n\": [1, [2]]},\n  "
      "{\"text\"\n:"
      "\"\"} ,{\"a\": {\"b]\": \"\\\"],[\"}, \"text\": "
      "\"gr\xc3\xbc\\u00df \\ud83d\\ude00\"}\n]\n\n";
  EXPECT_THAT(read("b.json", list), expected);
  EXPECT_THAT(read("b.json.gz", gzip(list)), expected);
  EXPECT_THAT(read("b.json.zst", zstd(list)), expected);
  EXPECT_THAT(read("b", list, {.format = "jsonl"}), expected);
  EXPECT_THAT(read("b.json", list, {.format = "text"}), ElementsAre(list));
  EXPECT_THAT(read("c.json", " [ ] \n"), ElementsAre());
  EXPECT_THAT(read("c.json", "\n"), ElementsAre());
}

TEST_F(DocumentsTest, ABadElementIsNamed) {
  const std::string good = "[{\"text\": \"a\"},\n\n";
  const auto expect = [&](const std::string& rest, const std::string& what) {
    EXPECT_THAT(message("a.json", good + rest),
                AllOf(HasSubstr("a.json"), HasSubstr(what)));
  };
  expect("{\"text\": }]", ": record 2 (line 3): column 10: not JSON: ");
  expect("{\"text\"\n: }]", "(line 3): in its line 2, column 3: not JSON: ");
  expect("{\"text\": \"a\"} {}]", ": record 2 (line 3): column");
  expect("]", ": record 2 (line 3): column 1: not JSON: ");
  expect("}, 1]", ": record 2 (line 3): column 1: not JSON: ");
  expect("[1, 2]]", "record 2 (line 3): is a list, not an object");
  expect("{\"u\": 1}]", "record 2 (line 3): the record has no field \"text\"");
  expect("{\"text\": \"caf\xe9\"}]", "at offset 13 of the record");
  expect("{\"text\": \"b\"}", "(line 3): the file ends within the list");
  expect("{\"text\": \"b", "(line 3): the file ends within the list");
  expect("{\"text\": \"b\"}]\n[]", ": line 4: there is more behind the end");
}

TEST_F(DocumentsTest, OtherJsonIsRefusedWithTheWayOut) {
  for (const std::string json :
       {"{\n  \"text\": \"a\"\n}\n", "{\"text\": \"a\"", "\"a\"", "7\n",
        "// a remark\n{}\n", "{} {"}) {
    EXPECT_THAT(message("a.json", json),
                AllOf(HasSubstr("a.json: is neither lines"),
                      HasSubstr("jq -c . IN.json >OUT.jsonl"),
                      HasSubstr("data.format to text")));
    EXPECT_THAT(read("a.json", json, {.format = "text"}), ElementsAre(json));
  }
  EXPECT_THAT(message("a.jsonl", "[{\"text\": \"a\"}]"),
              HasSubstr("a.jsonl:1: is a list, not an object as {\"text\""));
  EXPECT_THAT(message("a.jsonl", "[1]", {.field = "body"}),
              HasSubstr("not an object as {\"body\""));
}

TEST_F(DocumentsTest, TwoTextsMayBeAPair) {
  EXPECT_THAT(message("a.jsonl", "{\"ask\": \"a\", \"n\": 1, \"say\": \"b\"}"),
              HasSubstr("data.field to the one with the text, or data.pair to "
                        "the two with a prompt and its answer, as "
                        "--data.format=chat --data.pair=ask,say."));
  EXPECT_THAT(message("a.jsonl", "{\"body\": \"a\", \"n\": 1}"),
              ::testing::Not(HasSubstr("data.pair")));
}

TEST_F(DocumentsTest, LinesMayBeLongerThanWhatIsReadAtOnce) {
  std::string text;
  std::vector<std::string> expected;
  for (const size_t size : {0, 1, 262'100, 262'144, 262'145, 900'000, 3}) {
    expected.emplace_back(size, 'x');
    text += "{\"text\": \"" + expected.back() + "\"}\n";
  }
  EXPECT_EQ(read("a.jsonl", text), expected);
  EXPECT_EQ(read("a.jsonl.gz", gzip(text)), expected);
  EXPECT_EQ(read("a.jsonl.zst", zstd(text)), expected);
  std::ranges::replace(text, '\n', ',');
  text = "[" + text.substr(0, text.size() - 1) + "]";
  EXPECT_EQ(read("a.json", text), expected);
  EXPECT_EQ(read("a.json.gz", gzip(text)), expected);
}

TEST_F(DocumentsTest, CompressedTextIsOneDocument) {
  const std::string text(3'000'000, 'y');
  EXPECT_THAT(read("a.txt", text), ElementsAre(text));
  EXPECT_THAT(read("a.txt.gz", gzip(text)), ElementsAre(text));
  EXPECT_THAT(read("a.txt.zst", zstd(text)), ElementsAre(text));
  // Members and frames one behind another, as cat makes them.
  EXPECT_THAT(read("b.gz", gzip("one ") + gzip("two")), ElementsAre("one two"));
  EXPECT_THAT(read("b.zst", zstd("one ") + zstd("two")),
              ElementsAre("one two"));
  Documents documents(write("place.txt", "x"));
  EXPECT_TRUE(documents.next().has_value());
  EXPECT_EQ(documents.place(), folder_.file("place.txt"));
}

TEST_F(DocumentsTest, ABadLineIsNamed) {
  const std::string good = "{\"text\": \"a\"}\n\n";
  const auto expect = [&](const std::string& line, const std::string& what) {
    EXPECT_THAT(message("a.jsonl", good + line + "\n" + good),
                AllOf(HasSubstr("a.jsonl:3: "), HasSubstr(what)));
    EXPECT_THAT(message("a.jsonl.gz", gzip(good + line)),
                AllOf(HasSubstr("a.jsonl.gz:3: "), HasSubstr(what)));
  };
  expect("{\"text\": \"a\"", "column 13: not JSON: ");
  expect("hello", "column 1: not JSON: ");
  expect("{\"text\": \"a\"} {}", "not JSON: ");
  expect("{\"text\": \"a\", \"text\": \"b\"}", "duplicate key \"text\"");
  expect("{\"text\": \"\\ud800\"}", "not JSON: ");
  expect("[1, 2]", "is a list, not an object");
  expect("\"a\"", "is a text, not an object");
  expect("{\"t\": 1, \"u\": 2}",
         "no field \"text\"; it has \"t\", \"u\". Set data.field");
  expect("{}", "no field \"text\"; it has no field");
  expect("{\"text\": 7}", "\"text\" is a number, not a text");
  expect("{\"text\": null}", "\"text\" is null, not a text");
  expect("{\"text\": \"caf\xe9\"}", "the byte 0xe9 at offset 13");
}

TEST_F(DocumentsTest, WhatIsDamagedIsNamed) {
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += std::to_string(i * i) + " ";
  for (const auto& [name, packed] :
       {std::pair("a.txt.gz", gzip(text)), {"a.txt.zst", zstd(text)}}) {
    for (const size_t size : {packed.size() - 1, packed.size() / 2}) {
      const Error cut = error_of(name, packed.substr(0, size));
      EXPECT_EQ(cut.exit_code(), ExitCode::kInputOutput);
      EXPECT_THAT(message_of(cut),
                  AllOf(HasSubstr(name), HasSubstr("is cut off")));
    }
    std::string damaged = packed;
    for (size_t i = 100; i < 140; ++i) damaged[i] = '\x55';
    EXPECT_THAT(message_of(error_of(name, damaged)), HasSubstr(name));
    EXPECT_THAT(message_of(error_of(name, packed + "rest")), HasSubstr(name));
  }
  EXPECT_THAT(message_of(error_of("latin.txt", "caf\xe9")),
              AllOf(HasSubstr("latin.txt: the byte 0xe9 at offset 3"),
                    HasSubstr("data.exclude")));
  EXPECT_THAT(message_of(error_of("latin.txt.gz", gzip("caf\xe9"))),
              HasSubstr("latin.txt.gz (unpacked): the byte 0xe9"));
}

TEST_F(DocumentsTest, OtherKindsOfFilesAreRefusedByName) {
  EXPECT_THAT(message("a.jsonl", "\xff\xfe{"),
              AllOf(HasSubstr("a.jsonl: is UTF-16 text"), HasSubstr("iconv")));
  EXPECT_THAT(message("a.txt", std::string("\xff\xfe\0\0h\0\0\0", 8)),
              AllOf(HasSubstr("UTF-32 text"), HasSubstr("iconv -f UTF-32")));
  EXPECT_THAT(message("a.txt", std::string("\0h\0i", 4)),
              AllOf(HasSubstr("without a mark"), HasSubstr("UTF-16BE")));
  EXPECT_THAT(message("a.json", R"([{"text": "x"}, ])"),
              AllOf(HasSubstr("a.json: record 2 (line 1)"),
                    HasSubstr("Remove the comma")));
  EXPECT_THAT(message("a.parquet", "PAR1\x15\x04"),
              AllOf(HasSubstr("a.parquet: is Parquet"), HasSubstr("to_json")));
  EXPECT_THAT(message("a.jsonl.xz",
                      "\xfd"
                      "7zXZ\n"),
              HasSubstr("by xz"));
  EXPECT_THAT(message("a.bz2", "BZh91AY"), HasSubstr("by bzip2"));
  EXPECT_THAT(message("a.zip", "PK\x03\x04"), HasSubstr("ZIP"));
}

}  // namespace
}  // namespace tessera::data
