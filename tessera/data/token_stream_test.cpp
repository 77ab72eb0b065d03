#include "tessera/data/token_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/detail/document_batches.h"
#include "tessera/data/file_list.h"
#include "tessera/data/tokenizer_trainer.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

std::vector<int64_t> all_of(const TokenStream& stream) {
  std::vector<int64_t> ids(stream.size());
  stream.read(0, ids);
  return ids;
}

class TokenStreamTest : public ::testing::Test {
 protected:
  TokenStreamTest()
      : tokenizer_(train_tokenizer({"some words to learn from, and some more"},
                                   {.vocab_size = 270})) {}

  std::string write(const std::string& name, const std::string& bytes) {
    write_file_atomic(folder_.file(name), bytes);
    return folder_.file(name);
  }
  TokenSource source(std::vector<std::string> paths) {
    return {.paths = std::move(paths),
            .vocab_size = tokenizer_.vocab_size(),
            .tokenizer = &tokenizer_,
            .cache_folder = folder_.file("cache")};
  }
  std::vector<fs::path> caches() {
    return {fs::directory_iterator(folder_.file("cache")), {}};
  }

  TemporaryFolder folder_;
  Tokenizer tokenizer_;
};

TEST_F(TokenStreamTest, TextIsTokenizedOnceAndRead) {
  const std::string text = "some words and more words";
  const TokenSource source = this->source({write("a.txt", text)});
  prepare_tokens(source);
  EXPECT_EQ(all_of(open_tokens(source)), tokenizer_.encode(text));
  ASSERT_EQ(caches().size(), 1u);
  const auto written = fs::last_write_time(caches()[0]);
  prepare_tokens(source);
  EXPECT_EQ(fs::last_write_time(caches()[0]), written);
}

TEST_F(TokenStreamTest, DocumentsAreSeparated) {
  const TokenSource source =
      this->source({write("a.txt", "some"), write("b.txt", "more")});
  prepare_tokens(source);
  std::vector<int64_t> expected = tokenizer_.encode("some");
  expected.push_back(*tokenizer_.end_of_text());
  for (const int64_t id : tokenizer_.encode("more")) expected.push_back(id);
  EXPECT_EQ(all_of(open_tokens(source)), expected);
}

TEST_F(TokenStreamTest, KnowsWhereDocumentsBegin) {
  TokenSource source = this->source(
      {write("a.txt", "a b"), write("b.txt", "c"), write("c.txt", "d e f")});
  const auto starts_from = [&](int64_t first) {
    prepare_tokens(source);
    const TokenStream stream = open_tokens(source);
    std::vector<int64_t> starts(6);
    stream.document_starts(first, starts);
    return starts;
  };
  ASSERT_EQ(tokenizer_.encode("a b").size(), 3u);
  EXPECT_THAT(starts_from(0), ElementsAre(0, 0, 0, 0, 0, 0));
  source.documents_apart = true;
  EXPECT_THAT(starts_from(0), ElementsAre(0, 0, 0, 0, 4, 4));
  EXPECT_THAT(starts_from(2), ElementsAre(0, 0, 2, 2, 4, 4));
  EXPECT_THAT(starts_from(3), ElementsAre(0, 1, 1, 3, 3, 3));
}

TEST_F(TokenStreamTest, RecordsAreDocumentsBesideTexts) {
  const std::string records =
      "{\"text\": \"more\", \"body\": \"words\"}\n"
      "{\"text\": \"some words\", \"body\": \"\"}\n";
  TokenSource source =
      this->source({write("a.txt", "some"), write("b.jsonl", records)});
  const auto ids_of = [&](const std::vector<std::string>& documents) {
    std::vector<int64_t> ids;
    for (const std::string& text : documents) {
      if (!ids.empty()) ids.push_back(*tokenizer_.end_of_text());
      for (const int64_t id : tokenizer_.encode(text)) ids.push_back(id);
    }
    return ids;
  };
  prepare_tokens(source);
  EXPECT_EQ(all_of(open_tokens(source)),
            ids_of({"some", "more", "some words"}));
  source.field = "body";
  prepare_tokens(source);
  EXPECT_EQ(all_of(open_tokens(source)), ids_of({"some", "words", ""}));
  EXPECT_EQ(caches().size(), 2u);
  source = this->source({write("c.jsonl", "\n\n")});
  EXPECT_THAT(message_of([&] { prepare_tokens(source); }),
              HasSubstr("c.jsonl: has no text"));
  EXPECT_EQ(caches().size(), 2u);
}

// One batch after another, of a few bytes each.
TEST_F(TokenStreamTest, ALongTextIsReadInPartsAndHasTheSameIds) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += "some words and more words, 12 3 ";
  std::string records;
  for (int i = 0; i < 30; ++i) records += "{\"text\": \"more words\"}\n";
  const std::vector<std::string> paths = {
      write("a.txt", text), write("b.jsonl", records), write("c.txt", "some")};
  for (const size_t bytes : {1, 7, 100, 1000, 100'000}) {
    detail::DocumentBatches batches(paths, {}, SectionEnds::kBehindLetters,
                                    bytes);
    std::vector<std::vector<int64_t>> documents;
    int64_t count = 0;
    while (batches.next()) {
      ++count;
      for (const auto& part : batches.parts()) {
        if (part.begins) documents.emplace_back();
        for (const int64_t id : tokenizer_.encode(part.text)) {
          documents.back().push_back(id);
        }
      }
    }
    ASSERT_EQ(documents.size(), 32u);
    EXPECT_EQ(documents[0], tokenizer_.encode(text));
    EXPECT_EQ(documents[30], tokenizer_.encode("more words"));
    EXPECT_EQ(documents[31], tokenizer_.encode("some"));
    EXPECT_EQ(batches.num_documents(), 32);
    EXPECT_EQ(batches.consumed(), batches.total());
    EXPECT_EQ(count > 1, bytes < 100'000);
  }
}

// The ends of batches cut documents: what was given out before is let go all
// the same.
TEST_F(TokenStreamTest, OneBatchOfTextsIsInMemory) {
  constexpr size_t kBatch = 100, kRecords = 1000;
  size_t longest = 0, total = 0;
  std::string records;
  for (size_t i = 0; i < kRecords; ++i) {
    std::string text = "some words";
    for (size_t more = 0; more < i % 7; ++more) text += " and more words";
    records += "{\"text\": \"" + text + "\"}\n";
    longest = std::max(longest, text.size());
    total += text.size();
  }
  detail::DocumentBatches batches({write("a.jsonl", records)}, {},
                                  SectionEnds::kBehindLetters, kBatch);
  size_t given = 0, most_held = 0;
  while (batches.next()) {
    for (const auto& part : batches.parts()) given += part.text.size();
    most_held = std::max(most_held, batches.held_bytes());
  }
  EXPECT_EQ(given, total);
  EXPECT_GT(total, 100 * (kBatch + 2 * longest));
  EXPECT_LE(most_held, kBatch + 2 * longest);
}

TEST_F(TokenStreamTest, WhatKilledRunsLeftIsRemovedAndNothingElse) {
  const TokenSource source = this->source({write("a.txt", "some words")});
  const std::string left = "cache/tokens-0123.cache.tmp-999999-0";
  const std::string held = "cache/tokens-0123.cache.tmp-999999-1";
  write(left, "half");
  write("cache/other.txt", "kept");
  {
    write(held, "half");
    const FileLock writer(folder_.file(held), "");
    prepare_tokens(source);
    EXPECT_FALSE(fs::exists(folder_.file(left)));
    EXPECT_TRUE(fs::exists(folder_.file(held)));
    EXPECT_TRUE(fs::exists(folder_.file("cache/other.txt")));
  }
  prepare_tokens(source);
  EXPECT_FALSE(fs::exists(folder_.file(held)));
  EXPECT_EQ(caches().size(), 2u);
}

TEST_F(TokenStreamTest, ManyMayPrepareTheSameTextAtOnce) {
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += "some words and more words ";
  const TokenSource source = this->source({write("a.txt", text)});
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { prepare_tokens(source); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(all_of(open_tokens(source)) == tokenizer_.encode(text));
  EXPECT_EQ(caches().size(), 1u);
}

TEST_F(TokenStreamTest, ACacheIsATokenFileToo) {
  const TokenSource text = this->source({write("a.txt", "some words")});
  prepare_tokens(text);
  const std::string cache = caches()[0].string();
  EXPECT_EQ(detect_format(cache), "cache");
  EXPECT_EQ(all_of(open_tokens(source({cache}))),
            tokenizer_.encode("some words"));
}

TEST_F(TokenStreamTest, OtherTextOrTokenizerHasAnotherCache) {
  TokenSource source = this->source({write("a.txt", "some words")});
  prepare_tokens(source);
  write("a.txt", "some wordz");
  EXPECT_THROW(open_tokens(source), Error);
  prepare_tokens(source);
  EXPECT_EQ(caches().size(), 2u);
  const Tokenizer other = train_tokenizer({"other"}, {.vocab_size = 260});
  source.tokenizer = &other;
  prepare_tokens(source);
  EXPECT_EQ(caches().size(), 3u);
  EXPECT_EQ(all_of(open_tokens(source)), other.encode("some wordz"));
}

TEST_F(TokenStreamTest, AnotherEndOfTextHasAnotherCache) {
  const Tokenizer first = train_tokenizer(
      {"x"}, {.vocab_size = 259, .special_tokens = {"<a>", "<b>"}});
  TokenSource source =
      this->source({write("a.txt", "some"), write("b.txt", "words")});
  source.vocab_size = first.vocab_size();
  size_t count = 0;
  for (const char* end : {"", "<a>", "<b>"}) {
    first.save(folder_.path());
    write("tokenizer_config.json",
          std::string(R"({"eos_token": ")") + end + "\"}");
    const Tokenizer tokenizer = Tokenizer::load(folder_.path());
    source.tokenizer = &tokenizer;
    prepare_tokens(source);
    EXPECT_EQ(caches().size(), ++count);
    std::vector<int64_t> expected = tokenizer.encode("some");
    if (*end != 0) expected.push_back(*tokenizer.id_of(end));
    for (const int64_t id : tokenizer.encode("words")) expected.push_back(id);
    EXPECT_EQ(all_of(open_tokens(source)), expected);
  }
}

TEST_F(TokenStreamTest, ADamagedCacheIsMadeAnew) {
  const TokenSource source = this->source({write("a.txt", "some words")});
  prepare_tokens(source);
  const std::string path = caches()[0].string();
  const std::string good = read_file(path);
  for (size_t bit = 0; bit < 8 * good.size(); bit += 5) {
    // The reserved word is the only one that nothing hangs on.
    if (bit / 64 == 7) continue;
    std::string bytes = good;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    std::ofstream(path, std::ios::binary) << bytes;
    EXPECT_THAT(message_of([&] { open_tokens(source); }), HasSubstr(path));
  }
  for (size_t size = 0; size < good.size(); size += 7) {
    std::ofstream(path, std::ios::binary) << good.substr(0, size);
    EXPECT_THAT(message_of([&] { open_tokens(source); }), HasSubstr(path));
  }
  prepare_tokens(source);
  EXPECT_EQ(read_file(path), good);
}

TEST_F(TokenStreamTest, WhatDoesNotFitIsRefused) {
  TokenSource source = this->source({write("a.txt", "some words")});
  source.vocab_size = 200;
  EXPECT_THAT(message_of([&] { prepare_tokens(source); }),
              HasSubstr("the model's vocabulary 200"));
  source.tokenizer = nullptr;
  EXPECT_THAT(message_of([&] { prepare_tokens(source); }),
              HasSubstr("text needs a tokenizer"));
  source = this->source({write("empty.txt", "")});
  EXPECT_THAT(message_of([&] { prepare_tokens(source); }),
              HasSubstr("empty.txt: is empty"));
  source = this->source({write("latin.txt", "caf\xe9")});
  EXPECT_THAT(message_of([&] { prepare_tokens(source); }),
              HasSubstr("latin.txt: the byte 0xe9 at offset 3"));
  source = this->source({write("a.txt", "some"), write("b.bin", "ab")});
  EXPECT_THAT(
      message_of([&] { prepare_tokens(source); }),
      AllOf(HasSubstr("a.txt is text and"), HasSubstr("b.bin has tokens")));
  source = this->source({});
  EXPECT_THAT(message_of([&] { prepare_tokens(source); }),
              HasSubstr("no files"));
}

TEST_F(TokenStreamTest, FilesOfTokensAreOneStream) {
  const TokenStream stream =
      open_tokens(source({write("a.bin", std::string("\1\0\2\0", 4)),
                          write("b.bin", std::string("\3\0", 2)),
                          write("c.bin", std::string("\4\0\5\0\6\0", 6))}));
  EXPECT_EQ(all_of(stream), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  for (int64_t first = 0; first < 6; ++first) {
    for (int64_t size = 0; size <= 6 - first; ++size) {
      std::vector<int64_t> ids(size);
      stream.read(first, ids);
      for (int64_t i = 0; i < size; ++i) EXPECT_EQ(ids[i], first + i + 1);
    }
  }
  EXPECT_EQ(stream.fingerprints().size(), 3u);
}

TEST_F(TokenStreamTest, GlobsAndFoldersGiveSortedFiles) {
  for (const char* name : {"d/b.txt", "d/a.txt", "d/e/c.txt", "d/e/f/g.md",
                           "d/.hidden.txt", "d/x.bin"}) {
    write(name, "x");
  }
  write("d/nothing.txt", "");
  const auto names = [&](const std::string& pattern) {
    std::vector<std::string> found;
    for (const auto& path : expand_paths({folder_.file(pattern)}, "data.train"))
      found.push_back(fs::relative(path, folder_.path()).string());
    return found;
  };
  EXPECT_THAT(names("d/*.txt"), ElementsAre("d/a.txt", "d/b.txt"));
  EXPECT_THAT(names("d/[b-z].*"), ElementsAre("d/b.txt", "d/x.bin"));
  EXPECT_THAT(names("d/**/*.txt"),
              ElementsAre("d/a.txt", "d/b.txt", "d/e/c.txt"));
  EXPECT_THAT(names("d/**/g.md"), ElementsAre("d/e/f/g.md"));
  EXPECT_THAT(names("*/e/c.???"), ElementsAre("d/e/c.txt"));
  EXPECT_THAT(names("d"), ElementsAre("d/a.txt", "d/b.txt", "d/e/c.txt",
                                      "d/e/f/g.md", "d/x.bin"));
  EXPECT_THAT(names("d/nothing.txt"), ElementsAre("d/nothing.txt"));
  EXPECT_THAT(message_of([&] { names("d/*.json"); }),
              HasSubstr("d/*.json' matches no file"));
  EXPECT_THAT(message_of([&] { names("none.txt"); }),
              AllOf(HasSubstr("data.train: '"), HasSubstr("does not exist")));
  fs::create_directory(folder_.path() / "hollow");
  EXPECT_THAT(message_of([&] { names("hollow"); }), HasSubstr("has no file"));
}

TEST_F(TokenStreamTest, LinksThatLeadInCirclesLeadNowhere) {
  write("d/good/a.txt", "x");
  fs::create_symlink("loop", folder_.path() / "d" / "loop");
  const auto found = [&](const std::string& pattern) {
    return expand_paths({folder_.file(pattern)}, "data.train");
  };
  const std::string good = folder_.file("d/good/a.txt");
  for (const char* pattern : {"d", "d/*/a.txt", "d/*/*.txt", "d/**/*.txt"}) {
    EXPECT_THAT(found(pattern), ElementsAre(good)) << pattern;
  }
  EXPECT_THAT(message_of([&] { found("d/loop/*.txt"); }),
              HasSubstr("matches no file"));
  const std::vector<std::string> paths = {"d/loop", "d/loop/a.txt",
                                          std::string(300, 'x')};
  for (const std::string& path : paths) {
    const std::error_code reason = std::make_error_code(
        path[0] == 'x' ? std::errc::filename_too_long
                       : std::errc::too_many_symbolic_link_levels);
    EXPECT_THAT(message_of([&] { found(path); }),
                AllOf(HasSubstr("data.train: '" + folder_.file(path) +
                                "' cannot be read: "),
                      HasSubstr(reason.message())));
  }
}

TEST_F(TokenStreamTest, FilesAreLeftOutByGlobs) {
  for (const char* name : {"d/a.txt", "d/b.png", "d/e/c.txt", "d/e/f/g.md",
                           "d/e/f/h.txt", "d/drafts/a.txt"}) {
    write(name, "x");
  }
  const auto names = [&](const std::vector<std::string>& exclude) {
    std::vector<std::string> found;
    for (const auto& path :
         expand_paths({folder_.file("d")}, "data.train", exclude)) {
      found.push_back(fs::relative(path, folder_.path()).string());
    }
    return found;
  };
  EXPECT_THAT(names({"*.png", "drafts"}),
              ElementsAre("d/a.txt", "d/e/c.txt", "d/e/f/g.md", "d/e/f/h.txt"));
  EXPECT_THAT(names({"e/"}),
              ElementsAre("d/a.txt", "d/b.png", "d/drafts/a.txt"));
  EXPECT_THAT(names({"./e/*.txt", "drafts/*", "b.*"}),
              ElementsAre("d/a.txt", "d/e/f/g.md", "d/e/f/h.txt"));
  EXPECT_THAT(names({"d/**/*.txt"}), ElementsAre("d/b.png", "d/e/f/g.md"));
  EXPECT_THAT(names({folder_.file("d/e"), "a.tx", "xt"}),
              ElementsAre("d/a.txt", "d/b.png", "d/drafts/a.txt"));
  EXPECT_THAT(message_of([&] { names({"*"}); }),
              HasSubstr("data.exclude leaves out all 6 files"));
  EXPECT_THAT(message_of([&] { names({"b.png", ""}); }),
              HasSubstr("data.exclude: \"\" would leave out every file"));
}

TEST(FingerprintTest, TheFileAndTheRanksThatDifferAreNamed) {
  const std::vector<FileFingerprint> files = {{"a", 10, 1}, {"b", 20, 2}};
  std::vector<std::vector<FileFingerprint>> lists(4, files);
  const std::vector<int64_t> ranks = {0, 2, 4, 6};
  EXPECT_EQ(difference(lists, ranks), "");
  lists[1][0].path = "/elsewhere/a";  // another host may mount it elsewhere
  EXPECT_EQ(difference(lists, ranks), "");
  lists[2][1] = {"c", 20, 3};
  EXPECT_THAT(difference(lists, ranks),
              AllOf(HasSubstr("file 1 is b (20 bytes"), HasSubstr("on rank 0"),
                    HasSubstr("c (20 bytes"), HasSubstr("on rank 4")));
  lists[2] = {files[0]};
  EXPECT_THAT(difference(lists, ranks),
              AllOf(HasSubstr("rank 0 has 2 files and rank 4 has 1"),
                    HasSubstr("only one has is b")));
}

TEST(FingerprintTest, RanksCompare) {
  const std::vector<FileFingerprint> files = {{"a", 10, 1}, {"bc", 20, 2}};
  comm::run_threads(3, "shm", [&](comm::Communicator& communicator) {
    std::vector<FileFingerprint> own = files;
    compare_across(communicator.world(), own);
    if (communicator.rank() == 2) own[1].bytes = 19;
    EXPECT_THAT(message_of([&] { compare_across(communicator.world(), own); }),
                AllOf(HasSubstr("bc (20 bytes"), HasSubstr("bc (19 bytes"),
                      HasSubstr("on rank 2")));
    if (communicator.rank() == 1) own.clear();
    if (communicator.rank() == 2) own = files;
    EXPECT_THAT(message_of([&] { compare_across(communicator.world(), own); }),
                HasSubstr("rank 0 has 2 files and rank 1 has 0"));
    const bool reads = communicator.rank() != 1;
    compare_across(communicator.world(), own, reads);
    if (communicator.rank() == 2) own[0].xxh3 = 7;
    EXPECT_THAT(
        message_of([&] { compare_across(communicator.world(), own, reads); }),
        AllOf(HasSubstr("on rank 0"), HasSubstr("on rank 2")));
  });
}

}  // namespace
}  // namespace tessera::data
