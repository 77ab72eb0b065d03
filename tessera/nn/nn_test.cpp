#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "tessera/core/error.h"
#include "tessera/core/ignore_index.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/flash_attention.h"
#include "tessera/nn/latent_attention.h"
#include "tessera/nn/loss.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/rotary.h"

namespace tessera::nn {
namespace {

const auto kWide = at::TensorOptions().dtype(at::kDouble);

using Function = std::function<at::Tensor()>;

// Compares d sum(f * weight) / d input with central differences.
void expect_gradient(const Function& f, at::Tensor input) {
  const at::Tensor weight = at::randn_like(f()).detach();
  const at::Tensor gradient =
      torch::autograd::grad({(f() * weight).sum()}, {input})[0];
  const at::NoGradGuard no_grad;
  const auto value = [&] { return (f() * weight).sum().item<double>(); };
  constexpr double kStep = 1e-6;
  double* x = input.data_ptr<double>();
  const at::Tensor flat = gradient.contiguous().view({-1});
  for (int64_t i = 0; i < input.numel(); ++i) {
    const double kept = x[i];
    x[i] = kept + kStep;
    const double above = value();
    x[i] = kept - kStep;
    const double below = value();
    x[i] = kept;
    EXPECT_NEAR(flat[i].item<double>(), (above - below) / (2 * kStep), 1e-6)
        << "element " << i;
  }
}

void expect_all_gradients(torch::nn::Module& module, const Function& f,
                          const at::Tensor& input) {
  expect_gradient(f, input);
  for (const auto& parameter : parameters_of(module)) {
    SCOPED_TRACE(parameter.name);
    expect_gradient(f, parameter.tensor);
  }
}

template <typename T>
void fill(T& module, uint64_t seed = 7) {
  materialise(module, {.seed = seed, .dtype = at::kDouble});
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_of(module)) {
    parameter.tensor.add_(at::randn_like(parameter.tensor), 0.3);
  }
}

at::Tensor input(std::vector<int64_t> shape) {
  return at::randn(shape, kWide).requires_grad_();
}

TEST(Linear, Gradients) {
  Linear linear({.in = 3, .out = 4, .bias = true});
  fill(linear);
  const auto x = input({2, 3});
  expect_all_gradients(linear, [&] { return linear.forward(x); }, x);
}

TEST(Norm, RmsNormsAreTheirFormulasAndHaveTheirGradients) {
  for (const auto kind : {NormKind::kRmsNorm, NormKind::kRmsNormPlusOne}) {
    Norm norm(kind, 5, 1e-5);
    fill(norm);
    const auto x = input({2, 3, 5});
    const auto weight = parameters_of(norm)[0].tensor;
    const auto by = kind == NormKind::kRmsNorm ? weight : weight + 1;
    const auto expected = x * (x.pow(2).mean(-1, true) + 1e-5).rsqrt() * by;
    EXPECT_TRUE(at::allclose(norm.forward(x), expected, 1e-13, 1e-13));
    expect_all_gradients(norm, [&] { return norm.forward(x); }, x);
    const auto both = [&] {
      const auto [past, normed] = norm.branch(x);
      return past * 3 + normed;
    };
    EXPECT_TRUE(at::allclose(both(), x * 3 + expected, 1e-13, 1e-13));
    expect_all_gradients(norm, both, x);
  }
}

// What one of both outputs is not used for costs nothing.
TEST(Norm, ABranchMayBeUsedInPart) {
  Norm norm(NormKind::kRmsNorm, 5, 1e-5);
  fill(norm);
  const auto x = input({2, 3, 5});
  expect_all_gradients(norm, [&] { return norm.branch(x).second; }, x);
  norm.branch(x).first.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::ones_like(x)));
  EXPECT_FALSE(parameters_of(norm)[0].tensor.grad().defined());
}

TEST(Norm, RefusesAWeightOfAnotherWidthOrType) {
  Norm norm(NormKind::kRmsNorm, 5, 1e-5);
  fill(norm);
  EXPECT_THROW(norm.forward(at::ones({2, 6}, kWide)), tessera::Error);
  EXPECT_THROW(norm.forward(at::ones({2, 5}, at::kFloat)), tessera::Error);
}

TEST(Norm, BeginsAsThatOfAWeightOfOne) {
  Norm norm(NormKind::kRmsNormPlusOne, 5, 1e-5);
  materialise(norm, {.dtype = at::kDouble});
  EXPECT_EQ(parameters_of(norm)[0].tensor.abs().max().item<double>(), 0);
  Norm plain(NormKind::kRmsNorm, 5, 1e-5);
  materialise(plain, {.dtype = at::kDouble});
  const auto x = input({2, 5});
  EXPECT_TRUE(at::equal(norm.forward(x), plain.forward(x)));
}

// As if another rank had the same part of the width.
TEST(Norm, RmsNormInARegionTakesTheMeanOverItsRanks) {
  Norm alone(NormKind::kRmsNorm, 5, 1e-5), shared(NormKind::kRmsNorm, 5, 1e-5);
  fill(alone);
  fill(shared);
  const auto twice = [](const at::Tensor& x) { return 2 * x; };
  const auto same = [](const at::Tensor& x) { return x; };
  shared.set_region({.enter = same, .leave = twice, .ranks = 2});
  const auto x = input({2, 3, 5});
  parameters_of(shared)[0].tensor.detach().copy_(
      parameters_of(alone)[0].tensor.detach());
  EXPECT_TRUE(at::allclose(shared.forward(x), alone.forward(x), 1e-13, 1e-13));
  expect_all_gradients(shared, [&] { return shared.forward(x); }, x);
}

TEST(Norm, LayerNormGradients) {
  Norm norm(NormKind::kLayerNorm, 5, 1e-5);
  fill(norm);
  const auto x = input({2, 5});
  expect_all_gradients(norm, [&] { return norm.forward(x); }, x);
}

TEST(Norm, LowPrecisionComputesInFloat) {
  // Half a unit at 4 is 0.016 and 0.002.
  for (const auto& [type, bound] :
       {std::pair{at::kBFloat16, 0.02}, {at::kHalf, 0.0025}}) {
    for (const auto kind : {NormKind::kRmsNorm, NormKind::kRmsNormPlusOne,
                            NormKind::kLayerNorm}) {
      Norm narrow(kind, 64, 1e-5), wide(kind, 64, 1e-5);
      materialise(narrow, {.dtype = type});
      materialise(wide, {.dtype = at::kDouble});
      const auto x = at::randn({16, 64}).to(type);
      const auto error =
          (narrow.forward(x).to(at::kDouble) - wide.forward(x.to(at::kDouble)))
              .abs()
              .max();
      EXPECT_LT(error.item<double>(), bound);
    }
  }
}

TEST(Mlp, GradientsOfAllKinds) {
  for (const auto kind : {MlpKind::kGelu, MlpKind::kSwiGlu, MlpKind::kGeGlu}) {
    Mlp mlp({.kind = kind, .width = 3, .hidden = 5, .bias = true});
    fill(mlp);
    const auto x = input({2, 2, 3});
    expect_all_gradients(mlp, [&] { return mlp.forward(x); }, x);
  }
}

TEST(Mlp, GatesAreThoseOfLibTorch) {
  const auto gate = input({3, 4}), up = input({3, 4});
  const auto dy = at::randn({3, 4}, kWide);
  for (const auto kind : {MlpKind::kSwiGlu, MlpKind::kGeGlu}) {
    const auto plain =
        (kind == MlpKind::kSwiGlu ? at::silu(gate) : at::gelu(gate, "tanh")) *
        up;
    const auto ours = activated(kind, gate, up);
    EXPECT_TRUE(at::allclose(ours, plain, 1e-13, 1e-13));
    const auto wanted = torch::autograd::grad({plain}, {gate, up}, {dy});
    const auto found = torch::autograd::grad({ours}, {gate, up}, {dy});
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-12, 1e-12));
    }
  }
}

TEST(Mlp, GatesThatDoNotFitAreRefused) {
  const auto up = at::ones({3, 4}, kWide);
  for (const auto kind : {MlpKind::kSwiGlu, MlpKind::kGeGlu}) {
    EXPECT_THROW(activated(kind, at::ones({3, 1}, kWide), up), tessera::Error);
    EXPECT_THROW(activated(kind, at::ones({3, 4}), up), tessera::Error);
  }
}

TEST(Mlp, GeluIsTheTanhForm) {
  Mlp mlp({.kind = MlpKind::kGelu, .width = 1, .hidden = 1});
  materialise(mlp, {.dtype = at::kDouble});
  for (auto& parameter : parameters_of(mlp)) {
    const at::NoGradGuard no_grad;
    parameter.tensor.fill_(1.0);
  }
  const double x = 0.7;
  const double inner = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  EXPECT_NEAR(mlp.forward(at::full({1, 1, 1}, x, kWide)).item<double>(),
              0.5 * x * (1 + std::tanh(inner)), 1e-15);
}

TEST(Rotary, RotatesHalvesByPositionTimesFrequency) {
  RotaryTable table(4, 100.0);
  const auto x = input({1, 3, 1, 4});
  const auto y = rotate(x, table.rows(5, 3, x));
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < 2; ++i) {
      const double angle =
          static_cast<double>(5 + t) * std::pow(100.0, -i / 2.0);
      const double a = x[0][t][0][i].item<double>();
      const double b = x[0][t][0][i + 2].item<double>();
      EXPECT_NEAR(y[0][t][0][i].item<double>(),
                  a * std::cos(angle) - b * std::sin(angle), 1e-14);
      EXPECT_NEAR(y[0][t][0][i + 2].item<double>(),
                  b * std::cos(angle) + a * std::sin(angle), 1e-14);
    }
  }
}

TEST(Rotary, Gradient) {
  RotaryTable table(6, 10000.0);
  const auto x = input({2, 3, 2, 6});
  expect_gradient([&] { return rotate(x, table.rows(1, 3, x)); }, x);
}

// It turns lengths into none other: of |dx|^2 the gradient is 2 dy.
TEST(Rotary, ARecordedBackwardIsFollowed) {
  RotaryTable table(6, 10000.0);
  const auto x = input({2, 3, 2, 6}), dy = input({2, 3, 2, 6});
  const auto dx = torch::autograd::grad({rotate(x, table.rows(1, 3, x))}, {x},
                                        {dy}, /*retain_graph=*/true,
                                        /*create_graph=*/true)[0];
  const auto second = torch::autograd::grad({dx.square().sum()}, {dy})[0];
  EXPECT_TRUE(at::allclose(second, 2 * dy, 1e-12, 1e-12));
}

TEST(Rotary, RefusesAnglesOfAnotherShape) {
  RotaryTable table(6, 10000.0);
  const auto x = at::randn({2, 3, 2, 6}, kWide);
  EXPECT_THROW(rotate(x, table.rows(0, 2, x)), tessera::Error);
  EXPECT_THROW(rotate(x, table.rows(0, 3, x.to(at::kFloat))), tessera::Error);
  EXPECT_THROW(rotate(x.narrow(3, 0, 4), table.rows(0, 3, x)), tessera::Error);
}

// One by one, as a sampler asks for them, they are not all made again.
TEST(Rotary, OnePositionAfterTheOtherHasTheSameAngles) {
  constexpr int64_t kPositions = 40;
  RotaryTable whole(6, 10000.0), grown(6, 10000.0);
  const auto like = at::empty({1});
  const auto all = whole.rows(0, kPositions, like);
  const void* memory = nullptr;
  int times = 0;
  for (int64_t t = 0; t < kPositions; ++t) {
    const auto row = grown.rows(t, 1, like);
    EXPECT_TRUE(at::equal(row.cos, all.cos.narrow(0, t, 1)));
    EXPECT_TRUE(at::equal(row.sin, all.sin.narrow(0, t, 1)));
    times += row.cos.storage().data() != memory ? 1 : 0;
    memory = row.cos.storage().data();
  }
  EXPECT_LE(times, 7);
}

// Also of its gradient, which nobody else has; of one that somebody has not.
TEST(Rotary, InPlaceGivesTheSame) {
  RotaryTable table(40, 10000.0);
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto x = at::randn({2, 5, 3, 40}).to(type).requires_grad_();
    const auto dy = at::randn({2, 5, 3, 40}).to(type);
    const auto kept = dy.clone();
    const auto rotation = table.rows(0, 5, x);
    const auto gradient_of = [&](const auto& by) {
      const auto y = by(x * 1, rotation) * 1;
      return std::pair{
          y, torch::autograd::grad({y}, {x}, {dy}, /*retain_graph=*/false)[0]};
    };
    const auto [y, dx] = gradient_of(rotate);
    const auto [in_place, dx_in_place] = gradient_of(rotate_in_place);
    EXPECT_TRUE(at::equal(in_place, y));
    EXPECT_TRUE(at::equal(dx_in_place, dx));
    const auto memory = x.detach().clone();
    EXPECT_TRUE(at::equal(rotate_in_place(memory, rotation), y));
    EXPECT_TRUE(at::equal(memory, y));
    const auto direct = rotate(x, rotation);
    torch::autograd::backward({direct}, {dy});
    EXPECT_TRUE(at::equal(dy, kept));
  }
}

TEST(Rotary, StridedInputAndGradientGiveTheSame) {
  RotaryTable table(8, 10000.0);
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto x = at::randn({2, 3, 4, 8}).to(type);
    const auto rotation = table.rows(0, 4, x);
    const auto strided = x.transpose(1, 2).contiguous().transpose(1, 2);
    const auto a = rotate(x.transpose(1, 2), rotation);
    const auto b = rotate(strided.transpose(1, 2), rotation);
    EXPECT_TRUE(at::equal(a, b));
  }
}

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

TEST(Attention, AnEmptyBatchIsRefused) {
  GroupedQueryAttention attention(
      {.width = 4, .heads = 2, .kv_heads = 2, .head_dim = 2});
  materialise(attention, {});
  EXPECT_THROW(attention.forward(at::empty({0, 3, 4}), {}), tessera::Error);
  EXPECT_THROW(attention.forward(at::empty({2, 0, 4}), {}), tessera::Error);
}

TEST(CrossEntropy, SumWeightAndGradientAreThoseOfTheFormula) {
  // Wide enough that rows go in several chunks.
  const auto logits = at::randn({37, 20011}, kWide).requires_grad_();
  auto targets = at::randint(20011, {37}, at::kLong);
  targets[3] = kIgnoreIndex;
  targets[36] = kIgnoreIndex;
  const auto expected = at::cross_entropy_loss(
      logits, targets, {}, at::Reduction::Sum, kIgnoreIndex);
  const auto loss = cross_entropy(logits.clone(), targets);
  EXPECT_EQ(loss.weight.item<double>(), 35.0);
  EXPECT_NEAR(loss.sum.item<double>(), expected.item<double>(), 1e-9);
  const auto ours = torch::autograd::grad({loss.sum * 0.25}, {logits})[0];
  const auto theirs = torch::autograd::grad({expected * 0.25}, {logits})[0];
  EXPECT_TRUE(at::allclose(ours, theirs, 1e-12, 1e-15));
}

TEST(CrossEntropy, AScaleMakesTheGradientAtOnce) {
  const auto logits = at::randn({9, 40}, kWide).requires_grad_();
  const auto targets = at::randint(40, {9}, at::kLong);
  const auto expected =
      at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum);
  const auto wanted = torch::autograd::grad({expected * 0.25}, {logits})[0];
  const auto overwritten = logits.detach().clone();
  const auto loss = cross_entropy(overwritten, targets, nullptr, 0.25);
  EXPECT_NEAR(loss.sum.item<double>(), expected.item<double>(), 1e-12);
  EXPECT_TRUE(at::allclose(overwritten, wanted, 1e-12, 1e-15));
  EXPECT_GT(overwritten._version(), 0);
}

// The gradient would go into a copy.
TEST(CrossEntropy, AScaleIsOfLogitsThatAreRows) {
  const auto logits = at::randn({2, 3, 5}, kWide).transpose(0, 1);
  const auto targets = at::randint(5, {3, 2}, at::kLong);
  EXPECT_THROW(cross_entropy(logits, targets, nullptr, 1.0), tessera::Error);
  EXPECT_NEAR(cross_entropy(logits, targets).sum.item<double>(),
              cross_entropy(logits.contiguous(), targets).sum.item<double>(),
              1e-12);
}

TEST(CrossEntropy, WhoKeptTheLogitsIsTold) {
  const auto logits = input({2, 5}).tanh();
  const auto loss = cross_entropy(logits, at::tensor({1, 2}, at::kLong));
  EXPECT_THROW(loss.sum.backward(), c10::Error);
}

TEST(CrossEntropy, HasNoSecondDerivative) {
  const auto logits = input({2, 5});
  const auto loss =
      cross_entropy(logits.clone(), at::tensor({1, 2}, at::kLong));
  EXPECT_THROW(torch::autograd::grad({loss.sum}, {logits}, {},
                                     /*retain_graph=*/true,
                                     /*create_graph=*/true),
               tessera::Error);
}

TEST(HeadLoss, RefusesWhatDoesNotFit) {
  const Head head{.weight = at::randn({5, 4}, kWide), .columns = 5};
  const auto targets = at::randint(5, {6}, at::kLong);
  const auto of = [&](at::IntArrayRef hidden) {
    return head_loss(head, at::randn(hidden, kWide), targets, 1.0);
  };
  of({6, 4});
  EXPECT_THROW(of({7, 4}), tessera::Error);
  EXPECT_THROW(of({3, 8}), tessera::Error);
}

// Rows enough for several lots, of which the last is shorter.
TEST(HeadLoss, InLotsIsThatOfWholeLogits) {
  const int64_t rows = 1201, width = 3, entries = 8209;
  ASSERT_LT(head_rows(rows, entries), rows);
  const auto hidden = at::randn({rows, width}, kWide).requires_grad_();
  const auto weight = at::randn({entries, width}, kWide).requires_grad_();
  auto targets = at::randint(entries, {rows}, at::kLong);
  targets[700] = kIgnoreIndex;
  const auto expected =
      at::cross_entropy_loss(at::mm(hidden, weight.t()), targets, {},
                             at::Reduction::Sum, kIgnoreIndex);
  const auto wanted =
      torch::autograd::grad({expected * 0.25}, {hidden, weight});
  const Head head{.weight = weight, .columns = entries};
  {
    const at::NoGradGuard no_grad;
    const auto alone = head_loss(head, hidden, targets);
    EXPECT_NEAR(alone.sum.item<double>(), expected.item<double>(), 1e-9);
  }
  const auto recorded = head_loss(head, hidden, targets);
  const auto asked =
      torch::autograd::grad({recorded.sum * 0.25}, {hidden, weight});
  for (const double times : {1.0, 2.0}) {  // the gradient is added to
    const auto overwritten = hidden.detach().clone();
    const auto loss = head_loss(head, overwritten, targets, 0.25);
    EXPECT_EQ(loss.weight.item<double>(), 1200.0);
    EXPECT_NEAR(loss.sum.item<double>(), expected.item<double>(), 1e-9);
    EXPECT_TRUE(at::allclose(overwritten, wanted[0], 1e-11, 1e-13));
    EXPECT_TRUE(at::allclose(weight.grad(), wanted[1] * times, 1e-11, 1e-13));
  }
  EXPECT_TRUE(at::allclose(asked[0], wanted[0], 1e-11, 1e-13));
  EXPECT_TRUE(at::allclose(asked[1], wanted[1], 1e-11, 1e-13));
}

TEST(HeadLoss, AFrozenHeadHasNoGradient) {
  const auto hidden = at::randn({6, 4}, kWide);
  const auto weight = at::randn({5, 4}, kWide);
  const auto targets = at::randint(5, {6}, at::kLong);
  const auto leaf = hidden.clone().requires_grad_();
  at::cross_entropy_loss(at::mm(leaf, weight.t()), targets, {},
                         at::Reduction::Sum)
      .backward();
  head_loss({.weight = weight, .columns = 5}, hidden, targets, 1.0);
  EXPECT_TRUE(at::allclose(hidden, leaf.grad(), 1e-12));
  EXPECT_FALSE(weight.grad().defined());
}

// Lots depend on what all ranks know alike, and cover all rows.
TEST(HeadLoss, LotsAreEven) {
  EXPECT_EQ(head_rows(2048, 8192), 512);
  EXPECT_EQ(head_rows(1201, 8209), 401);
  EXPECT_EQ(head_rows(600, 200'000), 300);
  EXPECT_EQ(head_rows(512, 200'000), 512);
  EXPECT_EQ(head_rows(5000, 100), 5000);
  EXPECT_EQ(head_rows(0, 100), 1);
  EXPECT_EQ(head_rows(65536, 50257, /*on_cpu=*/false), 5042);
}

TEST(CrossEntropy, LeavesLogitsAloneWithoutGradients) {
  const auto logits = at::randn({4, 7});
  const auto before = logits.clone();
  const auto targets = at::tensor({1, 2, 3, 4}, at::kLong);
  const auto loss = cross_entropy(logits, targets);
  EXPECT_TRUE(at::equal(logits, before));
  EXPECT_NEAR(loss.sum.item<double>(),
              at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum)
                  .item<double>(),
              1e-5);
}

TEST(CrossEntropy, LogitsOfLowPrecisionAreSummedInFloat) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto logits = at::randn({64, 1000}).to(type);
    const auto targets = at::randint(1000, {64}, at::kLong);
    const auto expected = at::cross_entropy_loss(
        logits.to(at::kDouble), targets, {}, at::Reduction::Sum);
    EXPECT_NEAR(cross_entropy(logits, targets).sum.item<double>(),
                expected.item<double>(), 1e-5 * expected.item<double>());
  }
}

TEST(CrossEntropy, NoTargetAtAllIsZero) {
  const auto logits = at::randn({2, 3, 5}, kWide).requires_grad_();
  const auto loss =
      cross_entropy(logits.clone(), at::full({2, 3}, kIgnoreIndex, at::kLong));
  EXPECT_EQ(loss.sum.item<double>(), 0.0);
  EXPECT_EQ(loss.weight.item<double>(), 0.0);
  EXPECT_EQ(
      torch::autograd::grad({loss.sum}, {logits})[0].abs().sum().item<double>(),
      0.0);
}

TEST(CrossEntropy, RefusesWhatDoesNotFit) {
  const auto logits = at::randn({2, 5});
  EXPECT_THROW(cross_entropy(logits, at::tensor({1, 2, 3}, at::kLong)),
               tessera::Error);
  EXPECT_ANY_THROW(cross_entropy(logits, at::tensor({1, 5}, at::kLong)));
  EXPECT_ANY_THROW(cross_entropy(logits, at::tensor({1, -1}, at::kLong)));
  EXPECT_THROW(cross_entropy(logits, at::tensor({1, 2}, at::kInt)),
               tessera::Error);
}

TEST(CrossEntropy, ASecondBackwardIsRefused) {
  const auto logits = at::randn({2, 5}).requires_grad_();
  const auto loss =
      cross_entropy(logits.clone(), at::tensor({1, 2}, at::kLong));
  torch::autograd::backward({loss.sum}, {}, /*retain_graph=*/true);
  EXPECT_THROW(torch::autograd::backward({loss.sum}), tessera::Error);
}

}  // namespace
}  // namespace tessera::nn
