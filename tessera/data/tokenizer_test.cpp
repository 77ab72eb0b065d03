#include "tessera/data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/detail/byte_level.h"
#include "tessera/data/detail/sections.h"
#include "tessera/data/detail/splitter.h"
#include "tessera/data/detail/utf8.h"
#include "tessera/data/tokenizer_trainer.h"

namespace tessera::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The 256 bytes in order as ids 0-255, then "th", "the", " the".
TokenizerSpec small_spec() {
  TokenizerSpec spec;
  for (int byte = 0; byte < 256; ++byte) {
    spec.tokens.push_back(
        detail::to_byte_level(std::string(1, static_cast<char>(byte))));
  }
  for (const char* token : {"th", "the", " the"}) {
    spec.tokens.push_back(detail::to_byte_level(token));
  }
  spec.merges = {{'t', 'h'}, {256, 'e'}, {' ', 257}};
  spec.added = {{.id = 259, .content = "<|end|>"},
                {.id = 260, .content = "<|end|>>", .special = false}};
  return spec;
}

std::vector<std::string> words_of(SplitPattern pattern, std::string_view text) {
  const detail::Splitter splitter(pattern);
  detail::WordCursor cursor(splitter, text);
  std::vector<std::string> words;
  for (std::string_view word; cursor.next(word);) words.emplace_back(word);
  return words;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST(Utf8Test, FindsTheFirstByteThatIsNotUtf8) {
  const auto npos = std::string_view::npos;
  EXPECT_EQ(detail::find_invalid_utf8(""), npos);
  EXPECT_EQ(detail::find_invalid_utf8("abc \xc3\xa9 \xf0\x9f\x98\x80"), npos);
  EXPECT_EQ(detail::find_invalid_utf8("caf\xe9"), 3u);
  EXPECT_EQ(detail::find_invalid_utf8("0123456789\x80"), 10u);
  EXPECT_EQ(detail::find_invalid_utf8("a\xc0\xaf"), 1u);         // overlong
  EXPECT_EQ(detail::find_invalid_utf8("\xed\xa0\x80"), 0u);      // surrogate
  EXPECT_EQ(detail::find_invalid_utf8("\xf4\x90\x80\x80"), 0u);  // too large
  EXPECT_EQ(detail::find_invalid_utf8("ab\xf0\x9f\x98"), 2u);    // cut off
  EXPECT_EQ(detail::find_invalid_utf8("\xff\xfe"
                                      "a"),
            0u);  // UTF-16
}

TEST(Utf8Test, ShowsWhatCannotBeText) {
  const std::string mark = "\xef\xbf\xbd";
  EXPECT_EQ(detail::replace_invalid_utf8("a\x80z"), "a" + mark + "z");
  EXPECT_EQ(detail::replace_invalid_utf8("\xf0\x9f\x98"), mark);
  EXPECT_EQ(detail::replace_invalid_utf8("\xe2\x82z"), mark + "z");
  EXPECT_EQ(detail::replace_invalid_utf8("\xed\xa0\x80"), mark + mark + mark);
}

TEST(Utf8Test, CodePointsSurviveTheWayThereAndBack) {
  for (uint32_t c = 0; c < 0x110000; ++c) {
    if (c == 0xd800) c = 0xe000;
    std::string text;
    detail::append_code_point(text, c);
    size_t at = 0;
    ASSERT_EQ(detail::next_code_point(text, at), c);
    ASSERT_EQ(at, text.size());
    ASSERT_EQ(detail::find_invalid_utf8(text), std::string_view::npos) << c;
  }
}

TEST(ByteLevelTest, EveryByteHasACharacter) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes += static_cast<char>(byte);
  const std::string token = detail::to_byte_level(bytes);
  EXPECT_EQ(detail::from_byte_level(token), bytes);
  EXPECT_EQ(detail::to_byte_level(" a\n"),
            "\xc4\xa0"
            "a\xc4\x8a");
  EXPECT_EQ(detail::from_byte_level("with space"), std::nullopt);
}

TEST(SplitterTest, CutsAsTheTokenizersDo) {
  EXPECT_THAT(
      words_of(SplitPattern::kGpt2, "I'll  pay $1234,don't"),
      ElementsAre("I", "'ll", " ", " pay", " $", "1234", ",", "don", "'t"));
  EXPECT_THAT(
      words_of(SplitPattern::kLlama3, "I'LL pay $1234;\n\n  x"),
      ElementsAre("I", "'LL", " pay", " $", "123", "4", ";\n\n", " ", " x"));
  EXPECT_THAT(words_of(SplitPattern::kQwen2, "v12.5"),
              ElementsAre("v", "1", "2", ".", "5"));
}

// U+180E is no white space for Unicode, but is for PCRE2's own \s.
TEST(SplitterTest, WhiteSpaceIsUnicodes) {
  EXPECT_THAT(words_of(SplitPattern::kGpt2,
                       "a\xc2\x85\xe3\x80\x80"
                       "b"),
              ElementsAre("a", "\xc2\x85", "\xe3\x80\x80", "b"));
  EXPECT_THAT(words_of(SplitPattern::kGpt2, "a \xe1\xa0\x8e!"),
              ElementsAre("a", " \xe1\xa0\x8e!"));
}

TEST(SplitterTest, WordsAsLongAsTheText) {
  for (const auto pattern :
       {SplitPattern::kGpt2, SplitPattern::kLlama3, SplitPattern::kQwen2}) {
    for (const char c : {'a', ' ', '\n', '!'}) {
      EXPECT_EQ(words_of(pattern, std::string(3'000'000, c)).size(), 1u);
    }
    std::string accents;
    for (int i = 0; i < 1'000'000; ++i) accents += "\xc3\xa9";
    EXPECT_EQ(words_of(pattern, accents).size(), 1u);
  }
}

TEST(TokenizerTest, MergesInTheOrderOfTheirRanks) {
  const Tokenizer tokenizer(small_spec());
  EXPECT_THAT(tokenizer.encode("the the th"), ElementsAre(257, 258, ' ', 256));
  EXPECT_EQ(tokenizer.vocab_size(), 261);
}

TEST(TokenizerTest, OfAddedTokensTheLongestIsTaken) {
  const Tokenizer tokenizer(small_spec());
  EXPECT_THAT(tokenizer.encode("a<|end|>b<|end|>><|end|"),
              ElementsAre('a', 259, 'b', 260, '<', '|', 'e', 'n', 'd', '|'));
  const std::vector<int64_t> ids = {'a', 259, 260};
  EXPECT_EQ(tokenizer.decode(ids), "a<|end|>>");
  EXPECT_EQ(tokenizer.decode(ids, true), "a<|end|><|end|>>");
}

TEST(TokenizerTest, IgnoringMergesTakesAWordWhole) {
  TokenizerSpec spec = small_spec();
  spec.merges = {{'t', 'h'}, {256, 'e'}};
  EXPECT_THAT(Tokenizer(spec).encode(" the"), ElementsAre(' ', 257));
  spec.ignore_merges = true;
  EXPECT_THAT(Tokenizer(spec).encode(" the"), ElementsAre(258));
}

TEST(TokenizerTest, PutsItsTokensAroundAText) {
  TokenizerSpec spec = small_spec();
  spec.before = {259};
  spec.after = {260, 259};
  const Tokenizer tokenizer(spec);
  EXPECT_THAT(tokenizer.encode("a"), ElementsAre('a'));
  EXPECT_THAT(tokenizer.encode("a", true), ElementsAre(259, 'a', 260, 259));
}

// Words above 64 bytes are merged through a queue.
TEST(TokenizerTest, LongWordsMergeAsShortOnesDo) {
  const Tokenizer tokenizer(small_spec());
  for (const size_t repeats : {10u, 21u, 22u, 1000u, 300'000u}) {
    std::string text;
    for (size_t i = 0; i < repeats; ++i) text += "the";
    EXPECT_EQ(tokenizer.encode(text), std::vector<int64_t>(repeats, 257));
  }
}

TEST(TokenizerTest, TextThatIsNotUtf8IsRefusedWithItsPlace) {
  const Tokenizer tokenizer(small_spec());
  EXPECT_THAT(message_of([&] { tokenizer.encode("caf\xe9"); }),
              HasSubstr("the byte 0xe9 at offset 3 is not UTF-8"));
}

TEST(TokenizerTest, IdsOutsideTheVocabularyAreRefused) {
  const Tokenizer tokenizer(small_spec());
  for (const int64_t id : {int64_t{-1}, int64_t{261}, INT64_MAX, INT64_MIN}) {
    EXPECT_THAT(message_of([&] { tokenizer.decode({{id}}); }),
                HasSubstr("ids are 0 to 260"));
  }
}

// As in vocabularies that were made of others; a model may draw them.
TEST(TokenizerTest, IdsThatAreLeftOutStandForNothing) {
  TokenizerSpec spec = small_spec();
  spec.added.push_back({.id = 276, .content = "<|last|>"});
  const Tokenizer tokenizer(spec);
  EXPECT_EQ(tokenizer.vocab_size(), 277);
  const std::vector<int64_t> ids = {'a', 261, 275, 'b', 276};
  EXPECT_EQ(tokenizer.decode(ids, true), "ab<|last|>");
}

TEST(TokenizerTest, AVocabularyWithoutAByteIsRefused) {
  TokenizerSpec spec = small_spec();
  spec.tokens['a'].clear();
  EXPECT_THAT(message_of([&] { Tokenizer(spec, "x.json"); }),
              HasSubstr("x.json: the vocabulary has no token for the byte "
                        "0x61"));
}

TEST(TokenizerTest, MergesOfWhatIsNotByteLevelAreRefused) {
  TokenizerSpec spec = small_spec();
  spec.added.clear();
  for (const char* token : {"\u65e5", "\u672c", "\u65e5\u672c"}) {
    spec.tokens.push_back(token);
  }
  spec.merges.push_back({259, 260});
  EXPECT_THAT(message_of([&] { Tokenizer(spec, "x.json"); }),
              HasSubstr("x.json: merge 3 joins the id 259"));
  spec.merges.back() = {'t', 4096};
  EXPECT_THAT(message_of([&] { Tokenizer(spec, "x.json"); }),
              HasSubstr("joins the id 4096"));
}

TEST(TokenizerTest, BytesSurviveTheWayThereAndBack) {
  const Tokenizer tokenizer(small_spec());
  std::string text;
  for (uint32_t c = 0; c < 0x3000; ++c) detail::append_code_point(text, c);
  const auto ids = tokenizer.encode(text);
  EXPECT_EQ(tokenizer.decode(ids), text);
  // Half a character is shown as a mark, and kept as a byte.
  const std::vector<int64_t> half = {0xc3};
  EXPECT_EQ(tokenizer.decode(half), "\xef\xbf\xbd");
  EXPECT_EQ(tokenizer.decode_bytes(half), "\xc3");
}

TEST(TokenizerTest, FilesReadBackTheSame) {
  const TemporaryFolder folder;
  TokenizerSpec spec = small_spec();
  spec.before = {259};
  for (const auto pattern :
       {SplitPattern::kGpt2, SplitPattern::kLlama3, SplitPattern::kQwen2}) {
    spec.pattern = pattern;
    spec.nfc = pattern == SplitPattern::kQwen2;
    spec.add_prefix_space = pattern == SplitPattern::kGpt2;
    const Tokenizer tokenizer(spec);
    tokenizer.save(folder.file("model"));
    const Tokenizer loaded = Tokenizer::load(folder.file("model"));
    EXPECT_EQ(loaded.to_json(), tokenizer.to_json());
    EXPECT_EQ(loaded.encode("the e\xcc\x81 123", true),
              tokenizer.encode("the e\xcc\x81 123", true));
    tokenizer.save(folder.file("one.json"));
    EXPECT_EQ(read_file(folder.file("one.json")), tokenizer.to_json());
  }
}

TEST(TokenizerTest, BrokenFilesAreRefusedByName) {
  const TemporaryFolder folder;
  const std::string path = folder.file("tokenizer.json");
  EXPECT_THAT(message_of([&] { Tokenizer::load(path); }), HasSubstr(path));
  const std::string good = Tokenizer(small_spec()).to_json();
  for (size_t size = 0; size + 2 < good.size(); size += good.size() / 50) {
    std::ofstream(path, std::ios::binary) << good.substr(0, size);
    EXPECT_THAT(message_of([&] { Tokenizer::load(path); }), HasSubstr(path));
  }
  for (const char* text : {"[]", "3", "{\"model\": 3}", "{\"model\": {}}",
                           "{\"model\": {\"vocab\": [], \"merges\": []}}"}) {
    write_file_atomic(path, text);
    EXPECT_THAT(message_of([&] { Tokenizer::load(path); }), HasSubstr(path));
  }
}

TEST(TokenizerTest, ThreadsGiveTheIdsOfOne) {
  const Tokenizer tokenizer(small_spec());
  std::string text;
  for (int i = 0; text.size() < 5'000'000; ++i) {
    text += (i % 7 == 0 ? " the\n" : " th <|end|>") + std::to_string(i);
  }
  const std::vector<int64_t> expected = tokenizer.encode(text);
  for (const int64_t threads : {1, 3}) {
    const auto ids = tokenizer.encode_texts({text, "", text}, threads);
    ASSERT_EQ(ids.size(), 3u);
    EXPECT_TRUE(std::equal(ids[0].begin(), ids[0].end(), expected.begin(),
                           expected.end()));
    EXPECT_TRUE(ids[1].empty());
    EXPECT_EQ(ids[2], ids[0]);
  }
}

// A token that holds a space must not be cut by the border of two sections.
TEST(TokenizerTest, ThreadsFindTokensWithSpaces) {
  TokenizerSpec spec = small_spec();
  spec.added.push_back({.id = 261, .content = "  "});  // has no inner end
  EXPECT_EQ(Tokenizer(spec).section_ends(), SectionEnds::kBehindLetters);
  spec.added.back().content = "a a";
  const Tokenizer tokenizer(spec);
  std::string text;
  while (text.size() < 3'000'000) text += "a a ";
  const auto ids = tokenizer.encode_texts({text}, 2)[0];
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 261u),
            static_cast<int64_t>(text.size() / 4));
}

// Wherever a section may end, its words are those of the whole: also beside
// letters that form C takes apart (U+0958) or puts together, marks and tokens.
TEST(TokenizerTest, SectionsHaveTheIdsOfTheWhole) {
  const std::vector<std::string> pieces = {" ",
                                           "\n",
                                           "\xef\xbc\x8c",
                                           "\xe3\x80\x81",
                                           "\xe3\x80\x82",
                                           "the",
                                           "'s",
                                           "'",
                                           "7",
                                           "\xe5\xad\x97",
                                           "\xc3\xa9",
                                           "e\xcc\x81",
                                           "\xcc\x81",
                                           "\xe0\xa5\x98",
                                           "\xe0\xa4\xbc",
                                           "<|end|>",
                                           "\xd0\xb6",
                                           "\xe1\x84\x80",
                                           "\xe1\x85\xa1",
                                           "...",
                                           "\r\n",
                                           "\xe3\x80\x80",
                                           "\xf0\xa0\x80\x80"};
  std::mt19937 generator(5);
  for (const bool prefix : {false, true}) {
    for (const SplitPattern pattern :
         {SplitPattern::kGpt2, SplitPattern::kLlama3, SplitPattern::kQwen2}) {
      TokenizerSpec spec = small_spec();
      spec.pattern = pattern;
      spec.nfc = true;
      spec.add_prefix_space = prefix;
      const Tokenizer tokenizer(spec);
      ASSERT_NE(tokenizer.section_ends(), SectionEnds::kNone);
      int ends = 0;
      for (int round = 0; round < 300; ++round) {
        std::string text;
        for (int i = 0; i < 24; ++i)
          text += pieces[generator() % pieces.size()];
        const std::vector<int64_t> whole = tokenizer.encode(text);
        for (size_t at = 1; at < text.size(); ++at) {
          if (detail::end_of_section(text, at, tokenizer.section_ends()) !=
              at) {
            continue;
          }
          ++ends;
          std::vector<int64_t> parts = tokenizer.encode(text.substr(0, at));
          const std::vector<int64_t> rest = tokenizer.encode(text.substr(at));
          parts.insert(parts.end(), rest.begin(), rest.end());
          ASSERT_EQ(parts, whole) << text << " at " << at;
        }
      }
      EXPECT_GT(ends, prefix ? 50 : 300);
    }
  }
}

// Text of any writing comes in sections, with or without spaces.
TEST(TokenizerTest, SectionsOfAnyWritingEnd) {
  const auto sections_of = [](const std::string& sentence, SectionEnds ends) {
    std::string text;
    while (text.size() < (size_t{4} << 20)) text += sentence;
    std::vector<std::string_view> sections;
    detail::append_sections(text, ends, sections);
    return sections.size();
  };
  using enum SectionEnds;
  EXPECT_EQ(sections_of("\xd0\xb4\xd0\xb0 ", kBeforeSpaces), 4);
  EXPECT_EQ(sections_of("\xe5\xad\x97\xe3\x80\x82", kBehindLetters), 4);
  EXPECT_EQ(sections_of("\xe5\xad\x97\xe3\x80\x82", kBeforeSpaces), 1);
  EXPECT_EQ(sections_of("the\n", kBehindLetters), 4);
  EXPECT_EQ(sections_of("the ", kNone), 1);
}

// Recounts all pairs before each merge.
std::vector<std::pair<std::string, std::string>> merges_by_recounting(
    const std::vector<std::string>& words, size_t num_merges) {
  std::vector<std::vector<std::string>> parts;
  for (const std::string& word : words) {
    parts.emplace_back();
    for (const char c : word) parts.back().emplace_back(1, c);
  }
  std::vector<std::string> order;  // tokens as they came up
  for (int c = 0; c < 256; ++c) order.emplace_back(1, static_cast<char>(c));
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    const auto code_point = [](const std::string& byte) {
      return detail::byte_alphabet()[static_cast<uint8_t>(byte[0])];
    };
    return code_point(a) < code_point(b);
  });
  const auto rank = [&](const std::string& token) {
    return std::find(order.begin(), order.end(), token) - order.begin();
  };
  std::vector<std::pair<std::string, std::string>> merges;
  while (merges.size() < num_merges) {
    std::map<std::pair<long, long>, int> counts;
    for (const auto& word : parts) {
      for (size_t i = 0; i + 1 < word.size(); ++i) {
        ++counts[{rank(word[i]), rank(word[i + 1])}];
      }
    }
    if (counts.empty()) break;
    const auto best = std::max_element(
        counts.begin(), counts.end(),
        [](const auto& a, const auto& b) { return a.second < b.second; });
    const std::string left = order[best->first.first];
    const std::string right = order[best->first.second];
    merges.emplace_back(left, right);
    order.push_back(left + right);
    for (auto& word : parts) {
      for (size_t i = 0; i + 1 < word.size(); ++i) {
        if (word[i] != left || word[i + 1] != right) continue;
        word[i] += right;
        word.erase(word.begin() + static_cast<long>(i) + 1);
      }
    }
  }
  return merges;
}

TEST(TrainerTest, LearnsWhatRecountingLearns) {
  std::vector<std::string> words;
  uint32_t state = 12345;
  for (int i = 0; i < 400; ++i) {
    std::string word = " ";
    state = state * 1664525 + 1013904223;
    for (uint32_t k = 0; k < 2 + (state >> 28); ++k) {
      state = state * 1664525 + 1013904223;
      word += static_cast<char>('a' + (state >> 24) % 5 * (state >> 20) % 3);
    }
    words.push_back(word);
  }
  std::string text;
  for (const std::string& word : words) text += word;
  const Tokenizer tokenizer =
      train_tokenizer({text}, {.vocab_size = 256 + 60, .special_tokens = {}});
  std::vector<std::pair<std::string, std::string>> merges;
  for (const auto& [left, right] : tokenizer.spec().merges) {
    const auto& tokens = tokenizer.spec().tokens;
    merges.emplace_back(*detail::from_byte_level(tokens[left]),
                        *detail::from_byte_level(tokens[right]));
  }
  EXPECT_EQ(merges, merges_by_recounting(words, 60));
}

TEST(TrainerTest, ThreadsAndRunsGiveTheSameVocabulary) {
  std::string text;
  for (int64_t i = 0; text.size() < 3'000'000; ++i) {
    text += " word" + std::to_string(i * i % 1009) + (i % 9 == 0 ? ".\n" : "");
  }
  const std::string once =
      train_tokenizer({text}, {.vocab_size = 500, .threads = 1}).to_json();
  EXPECT_EQ(
      train_tokenizer({text}, {.vocab_size = 500, .threads = 4}).to_json(),
      once);
}

TEST(TrainerTest, SpecialTokensComeFirst) {
  const Tokenizer tokenizer = train_tokenizer(
      {"a b a b"},
      {.vocab_size = 260, .special_tokens = {"<|endoftext|>", "<s>"}});
  EXPECT_EQ(tokenizer.id_of("<|endoftext|>"), 0);
  EXPECT_EQ(tokenizer.id_of("<s>"), 1);
  EXPECT_EQ(tokenizer.end_of_text(), 0);
  EXPECT_EQ(tokenizer.encode("x<s>")[1], 1);
}

TEST(TrainerTest, WhatEndsATextIsItsConfigurationsWhereNoUsualNameIs) {
  const TemporaryFolder folder;
  const std::string config = folder.file("tokenizer_config.json");
  const auto end_of = [&](const std::string& first, const std::string& said) {
    train_tokenizer({"a b a b"},
                    {.vocab_size = 260, .special_tokens = {first, "<eos>"}})
        .save(folder.path());
    write_file_atomic(config, said);
    return Tokenizer::load(folder.path()).end_of_text();
  };
  EXPECT_EQ(end_of("<bos>", R"({"eos_token": "<eos>"})"), 1);
  EXPECT_EQ(end_of("<bos>", R"({"eos_token": {"content": "<eos>"}})"), 1);
  EXPECT_EQ(end_of("</s>", R"({"eos_token": "<eos>"})"), 0);
  EXPECT_EQ(end_of("<bos>", R"({"eos_token": "<end>"})"), std::nullopt);
  EXPECT_EQ(end_of("<bos>", "{}"), std::nullopt);
  // Saved again, it is said again.
  write_file_atomic(config, R"({"eos_token": "<eos>"})");
  Tokenizer::load(folder.path()).save(folder.path());
  EXPECT_EQ(Tokenizer::load(folder.path()).end_of_text(), 1);
}

TEST(TrainerTest, StopsWhereTheTextHasNoMorePairs) {
  const Tokenizer tokenizer = train_tokenizer({"abab"}, {.vocab_size = 1000});
  EXPECT_EQ(tokenizer.vocab_size(), 257 + 2);  // "ab", "abab"
}

TEST(TrainerTest, WrongWishesAreRefused) {
  EXPECT_THAT(message_of([] { train_tokenizer({"a"}, {.vocab_size = 256}); }),
              HasSubstr("256 bytes and 1 special tokens take 257"));
  EXPECT_THAT(message_of([] {
                train_tokenizer({"a"}, {.special_tokens = {"<a>", "<a>"}});
              }),
              HasSubstr("'<a>' is there twice"));
  EXPECT_THAT(message_of([] { train_tokenizer({"\xff"}, {}); }),
              HasSubstr("text 0: the byte 0xff at offset 0"));
}

}  // namespace
}  // namespace tessera::data
