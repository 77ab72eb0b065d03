#include "tessera/data/detail/chat_samples.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/ignore_index.h"
#include "tessera/data/dataset.h"
#include "tessera/data/tokenizer_trainer.h"
#include "tests/support/failure_of.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Letters are tokens of their own; "</s>" ends and fills.
class ChatSamples : public ::testing::Test {
 protected:
  ChatSamples()
      : tokenizer_(train_tokenizer(
            {"x"}, {.vocab_size = 257, .special_tokens = {"</s>"}})) {
    write_file_atomic(folder_.file("pairs.jsonl"),
                      R"({"prompt": "ab", "completion": "c"})"
                      "\n"
                      R"({"prompt": "d", "completion": "e"})"
                      "\n"
                      R"({"prompt": "fghi", "completion": "jklmn"})"
                      "\n"
                      R"({"prompt": "opqrstuvw", "completion": "x"})"
                      "\n");
  }
  TokenSource source(ChatForm form = {}) {
    form.seq_len = 7;
    return {.paths = {folder_.file("pairs.jsonl")},
            .vocab_size = tokenizer_.vocab_size(),
            .tokenizer = &tokenizer_,
            .cache_folder = folder_.file("cache"),
            .chat = form};
  }
  // Each sample's inputs, those whose next one counts in capitals; "." fills.
  std::vector<std::string> samples(const TokenSource& from) {
    prepare_tokens(from);
    const Dataset set(open_tokens(from),
                      {.seq_len = 7, .global_batch = 2, .shuffle = false});
    std::vector<std::string> texts;
    for (int64_t i = 0; i < set.sampler().num_samples(); ++i) {
      const Batch batch = set.in_order(i, 1);
      std::string text;
      for (int64_t t = 0; t < 7; ++t) {
        const auto id = batch.inputs[0][t].item<int64_t>();
        const bool ends = id == *tokenizer_.end_of_text();
        std::string letter = ends ? "." : tokenizer_.decode({&id, 1});
        const bool counts = batch.targets[0][t].item<int64_t>() != kIgnoreIndex;
        text += counts ? static_cast<char>(std::toupper(letter[0])) : letter[0];
      }
      texts.push_back(text);
    }
    return texts;
  }

  TemporaryFolder folder_;
  Tokenizer tokenizer_;
};

TEST_F(ChatSamples, EachHasItsOwnAndIsCutAtItsEnd) {
  EXPECT_THAT(samples(source()), ElementsAre("aBC....", "DE.....", "fghIJKl"));
}

TEST_F(ChatSamples, ATemplateThatWritesNothingIsToBlame) {
  for (const std::string written :
       {"", "{# gone #}", "{% generation %}{% endgeneration %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}"
        "{% endfor %}"}) {
    write_file_atomic(folder_.file("none.jinja"), written);
    std::string said;
    try {
      prepare_tokens(source({.chat_template = folder_.file("none.jinja")}));
    } catch (const Error& error) {
      said = message_of(error);
    }
    EXPECT_THAT(said, AllOf(HasSubstr("the chat template " +
                                      folder_.file("none.jinja")),
                            HasSubstr("writes nothing of an answer for any"),
                            Not(HasSubstr("seq_len"))))
        << written;
  }
}

TEST_F(ChatSamples, PackedWhereTheyFit) {
  EXPECT_THAT(samples(source({.packing = true})),
              ElementsAre("aBC.DE.", "fghIJKl"));
}

TEST_F(ChatSamples, PackedOnesAreApart) {
  const auto starts_of = [&](const TokenSource& from) {
    prepare_tokens(from);
    const Dataset set(open_tokens(from),
                      {.seq_len = 7, .global_batch = 2, .shuffle = false});
    return set.batch(0, 0, 2).document_starts;
  };
  EXPECT_FALSE(starts_of(source()).defined());
  EXPECT_TRUE(at::equal(
      starts_of(source({.packing = true})),
      at::tensor({0, 0, 0, 0, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0}, at::kLong)
          .view({2, 7})));
}

TEST_F(ChatSamples, AllTokensCountWhereThatIsAsked) {
  EXPECT_THAT(samples(source({.loss_on = "all"})),
              ElementsAre("ABC....", "DE.....", "FGHIJKl", "OPQRSTu"));
}

TEST_F(ChatSamples, TargetsOfAStepAreCounted) {
  prepare_tokens(source());
  const Dataset set(open_tokens(source()),
                    {.seq_len = 7, .global_batch = 2, .shuffle = false});
  EXPECT_EQ(set.num_targets(0), 2 + 2);
  EXPECT_EQ(set.num_targets(1), 3 + 2);
}

TEST_F(ChatSamples, ATemplateThatWritesTheDateIsSaid) {
  using ::testing::internal::CaptureStderr;
  using ::testing::internal::GetCapturedStderr;
  const std::string body =
      "{% for each in messages %}{{ each.content }}{% endfor %}";
  const std::string dated = folder_.file("dated.jinja");
  const std::string plain = folder_.file("plain.jinja");
  write_file_atomic(dated, "{{ strftime_now('%Y')[:0] }}" + body);
  write_file_atomic(plain, body);
  CaptureStderr();
  prepare_tokens(source({.chat_template = dated}));
  EXPECT_THAT(GetCapturedStderr(),
              HasSubstr("dated.jinja: the chat template may write today's"));
  CaptureStderr();
  prepare_tokens(source({.chat_template = plain}));
  EXPECT_THAT(GetCapturedStderr(), ::testing::Not(HasSubstr("strftime_now")));
}

// In two time zones whose days are never the same.
TEST_F(ChatSamples, CachesOfTwoDaysAreToldApart) {
  const std::string dated = folder_.file("dated.jinja");
  write_file_atomic(dated,
                    "{{ strftime_now('%d') }}{% for each in messages %}"
                    "{{ each.content }}{% endfor %}");
  const auto opened_in = [&](const char* zone, const std::string& cache) {
    ::setenv("TZ", zone, /*overwrite=*/1);
    ::tzset();
    auto from = source({.chat_template = dated});
    from.cache_folder = folder_.file(cache);
    prepare_tokens(from);
    ::unsetenv("TZ");
    ::tzset();
    return open_tokens(from);
  };
  const TokenStream early = opened_in("UTC+12", "early");
  const TokenStream late = opened_in("UTC-14", "late");
  EXPECT_EQ(early.caches().size(), 2u);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    const TokenStream& own = ranks.rank() == 0 ? early : late;
    compare_across(ranks.world(), own.fingerprints());
    compare_caches_across(ranks.world(), late.caches());
    const std::string said = testing::failure_of(
        [&] { compare_caches_across(ranks.world(), own.caches()); });
    for (const char* words : {"early/tokens-", "on rank 0", "late/tokens-",
                              "on rank 1", "strftime_now", "run.dir"}) {
      EXPECT_THAT(said, HasSubstr(words));
    }
    // Another rank reads for this one.
    compare_caches_across(ranks.world(), own.caches(), ranks.rank() == 0);
  });
}

// Samples of such templates were others once: their caches have another name.
TEST_F(ChatSamples, TheCacheKnowsWhichOfTwoTemplatesMarksAnswers) {
  const auto described = [&](const std::string& tools) {
    write_file_atomic(
        folder_.file("tokenizer_config.json"),
        R"({"chat_template": [{"name": "default", "template": "x"},
                              {"name": "tool_use", "template": ")" +
            tools + "\"}]}");
    return detail::describe({.tokenizer = folder_.path().string()});
  };
  EXPECT_THAT(described("{% generation %}y{% endgeneration %}"),
              HasSubstr("each marks"));
  EXPECT_THAT(described("y"), Not(HasSubstr("each marks")));
}

TEST_F(ChatSamples, OtherKindsOfFilesAreRefusedByName) {
  for (const std::string format : {"chat", "jsonl", "auto"}) {
    auto from = source();
    from.format = format;
    from.paths = {folder_.file("pairs.jsonl.parquet")};
    write_file_atomic(from.paths[0], "PAR1....PAR1");
    try {
      prepare_tokens(from);
      ADD_FAILURE() << "taken as " << format;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("parquet: is Parquet, which is not"));
    }
    from.paths = {folder_.file("pairs.xz")};
    write_file_atomic(from.paths[0],
                      "\xfd"
                      "7zXZ");
    EXPECT_THROW(prepare_tokens(from), Error);
  }
}

TEST_F(ChatSamples, TheCacheKnowsTheForm) {
  samples(source());
  samples(source({.packing = true}));
  const auto files = std::filesystem::directory_iterator(folder_.file("cache"));
  EXPECT_EQ(std::distance(begin(files), end(files)), 4);
}

TEST_F(ChatSamples, ADamagedMaskIsMadeAgain) {
  const auto before = samples(source());
  for (const auto& file :
       std::filesystem::directory_iterator(folder_.file("cache"))) {
    if (file.path().string().ends_with("-marks.cache")) {
      std::filesystem::resize_file(file.path(), 60);
    }
  }
  EXPECT_EQ(samples(source()), before);
}

TEST_F(ChatSamples, NothingToLearnIsRefused) {
  write_file_atomic(folder_.file("pairs.jsonl"),
                    R"({"prompt": "opqrstuvw", "completion": "x"})"
                    "\n");
  try {
    prepare_tokens(source());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("none has an answer within data.seq_len (7)"));
  }
}

}  // namespace
}  // namespace tessera::data
