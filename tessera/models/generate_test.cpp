#include "tessera/models/generate.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/small_models.h"

namespace tessera::models {
namespace {

TEST(Generate, TheSameSeedGivesTheSameTextAndOptionsNarrowIt) {
  const auto decoder = small_decoder("llama");
  const std::vector<int64_t> prompt = {1, 2, 3};
  const auto text = [&](GenerateOptions options) {
    options.max_new_tokens = 10;
    return generate(*decoder, prompt, options);
  };
  const auto greedy = text({.sampling = {.temperature = 0.0}});
  EXPECT_EQ(text({.sampling = {.temperature = 5.0}, .seed = 4}),
            text({.sampling = {.temperature = 5.0}, .seed = 4}));
  EXPECT_NE(text({.sampling = {.temperature = 5.0}, .seed = 4}),
            text({.sampling = {.temperature = 5.0}, .seed = 5}));
  EXPECT_EQ(text({.sampling = {.temperature = 5.0, .top_k = 1}}), greedy);
  EXPECT_EQ(text({.sampling = {.temperature = 5.0, .top_p = 1e-9}}), greedy);
  for (const int64_t id :
       text({.sampling = {.temperature = 100.0}, .num_tokens = 4})) {
    EXPECT_LT(id, 4);
  }
}

TEST(Generate, EndsAtAStopTokenAtMaxSeqAndWhenTold) {
  const auto decoder = small_decoder("gpt2");
  const std::vector<int64_t> prompt = {1, 2, 3};
  const auto greedy =
      generate(*decoder, prompt,
               {.max_new_tokens = 100, .sampling = {.temperature = 0.0}});
  EXPECT_EQ(greedy.size(), 13u);  // max_seq 16
  const auto stopped = generate(*decoder, prompt,
                                {.max_new_tokens = 100,
                                 .sampling = {.temperature = 0.0},
                                 .stop_tokens = {greedy[4]}});
  EXPECT_LE(stopped.size(), 4u);
  const auto told =
      generate(*decoder, prompt, {.sampling = {.temperature = 0.0}},
               [count = 0](int64_t) mutable { return ++count < 3; });
  EXPECT_EQ(told.size(), 3u);
}

// The draws follow the distribution of the first logits.
TEST(Generate, DrawsFollowTheProbabilities) {
  const auto decoder = small_decoder("llama");
  const std::vector<int64_t> prompt = {7};
  const at::NoGradGuard no_grad;
  const auto p = at::softmax(
      decoder->forward(at::tensor({7}, at::kLong).unsqueeze(0))[0][0] / 20.0,
      0);
  constexpr int64_t kDraws = 2000;
  auto counts = at::zeros({31}, at::kDouble);
  for (int64_t seed = 0; seed < kDraws; ++seed) {
    const auto tokens = generate(*decoder, prompt,
                                 {.max_new_tokens = 1,
                                  .sampling = {.temperature = 20.0},
                                  .seed = static_cast<uint64_t>(seed)});
    counts[tokens.at(0)] += 1;
  }
  const auto sigma = (p * (1 - p) * kDraws).sqrt();
  EXPECT_TRUE(
      ((counts - p * kDraws).abs() <= 5 * sigma + 1).all().item<bool>());
}

TEST(Generate, RefusesWhatCannotBe) {
  const auto decoder = small_decoder("llama");
  EXPECT_THROW(generate(*decoder, {}, {}), tessera::Error);
  EXPECT_THROW(generate(*decoder, std::vector<int64_t>(16, 1), {}),
               tessera::Error);
  EXPECT_THROW(generate(*decoder, {1}, {.sampling = {.temperature = -1.0}}),
               tessera::Error);
  EXPECT_THROW(generate(*decoder, {1}, {.sampling = {.top_p = 0.0}}),
               tessera::Error);
}

}  // namespace
}  // namespace tessera::models
