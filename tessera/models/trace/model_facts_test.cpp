#include "tessera/models/trace/model_facts.h"

#include <gtest/gtest.h>

namespace tessera::models {
namespace {

// On a GPU it is a mask, and where several heads of queries read one of keys
// all scores are there.
TEST(ModelFacts, AWindowCostsWhatRunsOnTheDevice) {
  const auto block = [](int64_t kv_heads, int64_t window,
                        c10::DeviceType device) {
    ModelConfig config;
    config.family = "mistral";
    config.layers = 1;
    config.hidden = 32;
    config.heads = 4;
    config.kv_heads = kv_heads;
    config.max_seq = 64;
    config.window = window;
    return trace::facts_of(trace::TracedModel(config, 2, 64),
                           {.device = device})
        .units.at(1);
  };
  constexpr int64_t kTokens = 64, kWidth = 8, kScores = 2 * 4 * 64 * 64;
  const auto more_kept = [&](int64_t kv_heads) {
    return block(kv_heads, 8, at::kCUDA).kept_bytes -
           block(kv_heads, 0, at::kCUDA).kept_bytes;
  };
  EXPECT_EQ(more_kept(4), kTokens * kTokens * 4);
  EXPECT_GT(more_kept(2), 2 * kScores * 4);
  for (const int64_t kv_heads : {4, 2}) {
    EXPECT_EQ(block(kv_heads, 8, at::kCUDA).forward.attention,
              4 * kScores * kWidth);
    EXPECT_EQ(block(kv_heads, 8, at::kCPU).forward.attention,
              4 * kScores / kTokens * 8 * kWidth);
  }
  EXPECT_EQ(block(4, 8, at::kCUDA).backward_input.attention,
            10 * kScores * kWidth);
  EXPECT_EQ(block(2, 8, at::kCUDA).backward_input.attention,
            8 * kScores * kWidth);
}

}  // namespace
}  // namespace tessera::models
