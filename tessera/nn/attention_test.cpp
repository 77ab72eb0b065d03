#include "tessera/nn/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "tessera/nn/flash_attention.h"
#include "tessera/nn/latent_attention.h"
#include "tessera/nn/rotary.h"
#include "tests/support/gradients.h"

namespace tessera::nn {
namespace {

struct AttentionCase {
  std::string name;
  AttentionOptions options;
  bool rotary;
};

class AttentionTest : public ::testing::TestWithParam<AttentionCase> {
 protected:
  Rotation rotation(const at::Tensor& x) {
    return GetParam().rotary ? table_.rows(0, x.size(1), x) : Rotation();
  }
  RotaryTable table_{GetParam().options.head_dim, 10000.0};
};

TEST_P(AttentionTest, Gradients) {
  GroupedQueryAttention attention(GetParam().options);
  fill(attention);
  const auto x = input({2, 3, GetParam().options.width});
  expect_all_gradients(
      attention, [&] { return attention.forward(x, {rotation(x)}); }, x);
}

TEST_P(AttentionTest, LaterTokensDoNotMatter) {
  GroupedQueryAttention attention(GetParam().options);
  fill(attention);
  const auto x = input({2, 5, GetParam().options.width});
  const auto whole = attention.forward(x, {rotation(x)});
  const auto start = x.narrow(1, 0, 3);
  EXPECT_TRUE(at::allclose(whole.narrow(1, 0, 3),
                           attention.forward(start, {rotation(start)}), 1e-12,
                           1e-12));
}

TEST_P(AttentionTest, CacheGivesTheSame) {
  const at::NoGradGuard no_grad;
  GroupedQueryAttention attention(GetParam().options);
  fill(attention);
  const auto x = input({2, 5, GetParam().options.width});
  const auto whole = attention.forward(x, {rotation(x)});
  KvCache cache{.capacity = 5};
  const auto part = [&](int64_t begin, int64_t count) {
    const auto tokens = x.narrow(1, begin, count);
    const auto angles =
        GetParam().rotary ? table_.rows(begin, count, x) : Rotation();
    return attention.forward(tokens, {angles}, &cache);
  };
  const auto pieces = at::cat({part(0, 3), part(3, 1), part(4, 1)}, 1);
  EXPECT_TRUE(at::allclose(whole, pieces, 1e-12, 1e-12));
  EXPECT_THROW(part(4, 1), tessera::Error);
}

TEST_P(AttentionTest, CacheGivesTheSameWithAWindow) {
  const at::NoGradGuard no_grad;
  GroupedQueryAttention attention(GetParam().options);
  fill(attention);
  const auto x = input({2, 6, GetParam().options.width});
  for (const int64_t window : {1, 2, 4, 9}) {
    const Sight sight{.window = window};
    const auto whole = attention.forward(x, {rotation(x), sight});
    KvCache cache{.capacity = 6};
    std::vector<at::Tensor> parts;
    for (const auto& [begin, count] :
         {std::pair{0, 3}, {3, 1}, {4, 1}, {5, 1}}) {
      const auto angles =
          GetParam().rotary ? table_.rows(begin, count, x) : Rotation();
      parts.push_back(attention.forward(x.narrow(1, begin, count),
                                        {angles, sight}, &cache));
    }
    EXPECT_TRUE(at::allclose(whole, at::cat(parts, 1), 1e-12, 1e-12)) << window;
  }
}

TEST(Attention, ACacheIsOfOneBatch) {
  const at::NoGradGuard no_grad;
  GroupedQueryAttention attention(
      {.width = 4, .heads = 2, .kv_heads = 2, .head_dim = 2});
  fill(attention);
  KvCache cache{.capacity = 4};
  attention.forward(input({2, 2, 4}), {}, &cache);
  EXPECT_THROW(attention.forward(input({1, 1, 4}), {}, &cache), tessera::Error);
}

TEST(Attention, LoopsRefuseHeadsThatDoNotFit) {
  const auto q = input({2, 7, 4, 6}), k = input({2, 7, 2, 6});
  const auto refuses = [&](const at::Tensor& keys, const at::Tensor& values) {
    EXPECT_FALSE(takes_flash(q, keys, values));
    EXPECT_THROW(flash_attention(q, keys, values), tessera::Error);
  };
  refuses(input({2, 7, 3, 6}), input({2, 7, 3, 6}));
  refuses(k, input({2, 7, 2, 4}));
  refuses(k, input({2, 7, 1, 6}));
  refuses(input({2, 5, 2, 6}), input({2, 5, 2, 6}));
}

TEST(Attention, HasNoSecondDerivative) {
  const auto q = input({1, 3, 2, 4}), k = input({1, 3, 2, 4});
  const at::Tensor starts = at::tensor({0, 1, 1}, at::kLong).view({1, 3});
  for (const at::Tensor& y :
       {flash_attention(q, k, k),
        causal_attention(q, k, k, {.document_starts = starts})}) {
    EXPECT_THROW(
        torch::autograd::grad({y.sum()}, {q}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true),
        tessera::Error);
  }
}

// By LibTorch's with a mask, which takes what the own loops do not.
TEST(Attention, WindowsWithoutLoops) {
  const auto q = input({2, 7, 4, 6});
  const auto k = input({2, 7, 2, 6}), v = input({2, 7, 2, 6});
  const auto apart = [](const at::Tensor& x) {
    return x.transpose(2, 3).contiguous().transpose(2, 3);
  };
  for (const int64_t window : {1, 3, 7, 20}) {
    const Sight sight{.window = window};
    EXPECT_TRUE(at::allclose(causal_attention(apart(q), k, v, sight),
                             causal_attention(q, k, v, sight), 1e-12, 1e-12));
  }
}

// Documents of 1, 3 and 1 tokens, and of 2 and 3.
TEST_P(AttentionTest, DocumentsDoNotSeeEachOther) {
  const auto& options = GetParam().options;
  GroupedQueryAttention attention(options);
  fill(attention);
  const auto x = input({2, 5, options.width});
  const at::Tensor starts =
      at::tensor({0, 1, 1, 1, 4, 0, 0, 2, 2, 2}, at::kLong).view({2, 5});
  const auto whole = attention.forward(x, {rotation(x), starts});
  const std::vector<std::vector<int64_t>> begins = {{0, 1, 4, 5}, {0, 2, 5}};
  for (int64_t b = 0; b < 2; ++b) {
    for (size_t i = 0; i + 1 < begins[b].size(); ++i) {
      const int64_t first = begins[b][i], length = begins[b][i + 1] - first;
      const auto of = [&](const at::Tensor& y) {
        return y.narrow(0, b, 1).narrow(1, first, length);
      };
      const auto alone = attention.forward(of(x), {rotation(of(x))});
      EXPECT_TRUE(at::allclose(of(whole), alone, 1e-12, 1e-12));
    }
  }
  expect_all_gradients(
      attention, [&] { return attention.forward(x, {rotation(x), starts}); },
      x);
}

// Alike, but for rounding.
TEST(Attention, DropsInAnyType) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kWidth = 12;
  GroupedQueryAttention attention(
      {.width = kWidth, .heads = 3, .kv_heads = 1, .head_dim = 4});
  fill(attention);
  const auto x = input({2, 5, kWidth});
  const auto of = [&](at::ScalarType type, double rate) {
    attention.to(type);
    Places places;
    if (rate > 0) places.sight.dropout = dropout_named("a", rate, {7, 3, 5});
    return attention.forward(x.to(type), places);
  };
  const at::Tensor wanted = of(at::kDouble, 0.4);
  EXPECT_FALSE(at::allclose(wanted, of(at::kDouble, 0)));
  const at::Tensor half = of(at::kHalf, 0.4);
  EXPECT_EQ(half.scalar_type(), at::kHalf);
  EXPECT_TRUE(at::allclose(half.to(at::kDouble), wanted, 2e-2, 2e-2));
}

TEST(Attention, AnEmptyBatchIsRefused) {
  GroupedQueryAttention attention(
      {.width = 4, .heads = 2, .kv_heads = 2, .head_dim = 2});
  materialise(attention, {});
  EXPECT_THROW(attention.forward(at::empty({0, 3, 4}), {}), tessera::Error);
  EXPECT_THROW(attention.forward(at::empty({2, 0, 4}), {}), tessera::Error);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, AttentionTest,
    ::testing::Values(
        AttentionCase{"gpt2",
                      {.width = 4,
                       .heads = 2,
                       .kv_heads = 2,
                       .head_dim = 2,
                       .qkv_bias = true,
                       .out_bias = true},
                      false},
        AttentionCase{"grouped",
                      {.width = 6, .heads = 4, .kv_heads = 2, .head_dim = 2},
                      true},
        AttentionCase{"one_kv_head_qk_norm_wide_heads",
                      {.width = 5,
                       .heads = 3,
                       .kv_heads = 1,
                       .head_dim = 4,
                       .qk_norm = QkNorm::kPerHead},
                      true},
        AttentionCase{"gemma",
                      {.width = 5,
                       .heads = 4,
                       .kv_heads = 2,
                       .head_dim = 4,
                       .qk_norm = QkNorm::kPerHead,
                       .norm = NormKind::kRmsNormPlusOne,
                       .q_scale = 0.7},
                      true},
        AttentionCase{"grouped_norm_of_all_heads",
                      {.width = 5,
                       .heads = 4,
                       .kv_heads = 2,
                       .head_dim = 2,
                       .qk_norm = QkNorm::kAllHeads},
                      true}),
    [](const auto& info) { return info.param.name; });

class LatentAttentionTest : public ::testing::TestWithParam<int64_t> {
 protected:
  LatentAttentionTest() { fill(attention_); }
  LatentAttention attention_{{.width = 6,
                              .heads = 2,
                              .head_dim = 5,
                              .rope_dim = 2,
                              .value_dim = 4,
                              .q_rank = GetParam(),
                              .kv_rank = 3,
                              .q_scale = 1.5}};
  RotaryTable table_{2, 10000.0};
};

TEST_P(LatentAttentionTest, Gradients) {
  const auto x = input({2, 3, 6});
  expect_all_gradients(
      attention_, [&] { return attention_.forward(x, {table_.rows(0, 3, x)}); },
      x);
}

TEST_P(LatentAttentionTest, CacheGivesTheSame) {
  const at::NoGradGuard no_grad;
  const auto x = input({2, 5, 6});
  const auto whole = attention_.forward(x, {table_.rows(0, 5, x)});
  KvCache cache{.capacity = 5};
  const auto part = [&](int64_t begin, int64_t count) {
    return attention_.forward(x.narrow(1, begin, count),
                              {table_.rows(begin, count, x)}, &cache);
  };
  const auto pieces = at::cat({part(0, 4), part(4, 1)}, 1);
  EXPECT_TRUE(at::allclose(whole, pieces, 1e-12, 1e-12));
}

// Queries of a latent vector, and of the hidden states.
INSTANTIATE_TEST_SUITE_P(Ranks, LatentAttentionTest, ::testing::Values(4, 0));

}  // namespace
}  // namespace tessera::nn
