#include "tessera/models/decoder.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <map>

#include "tessera/core/error.h"
#include "tessera/models/generate.h"
#include "tessera/models/hugging_face_config.h"
#include "tessera/models/hugging_face_names.h"
#include "tests/support/small_models.h"

namespace tessera::models {
namespace {

at::Tensor ids(int64_t samples, int64_t tokens) {
  return at::randint(31, {samples, tokens}, at::kLong);
}

// Of stacked experts those that they have one by one.
std::vector<std::string> parameter_names(Decoder& decoder) {
  std::vector<std::string> names;
  for (const auto& parameter : nn::parameters_of(decoder)) {
    auto experts = nn::names_of_experts(parameter.name, parameter.spec->layout);
    if (experts.empty()) experts = {parameter.name};
    std::ranges::move(experts, std::back_inserter(names));
  }
  return names;
}

class DecoderTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DecoderTest, LossIsTheSumOverAllTargets) {
  const auto decoder = small_decoder(GetParam());
  const auto x = ids(3, 7), y = ids(3, 7);
  const auto loss = decoder->loss(x, y);
  const auto expected = at::cross_entropy_loss(
      decoder->forward(x).view({-1, 31}), y.view({-1}), {}, at::Reduction::Sum);
  EXPECT_EQ(loss.weight.item<double>(), 21.0);
  EXPECT_NEAR(loss.sum.item<double>(), expected.item<double>(), 1e-10);
}

void expect_slopes(Decoder& decoder, const std::function<at::Tensor()>& value) {
  torch::autograd::backward({value()});
  const at::NoGradGuard no_grad;
  for (const auto& parameter : nn::parameters_of(decoder)) {
    const auto direction = at::randn_like(parameter.tensor);
    const auto at_distance = [&](double step) {
      parameter.tensor.add_(direction, step);
      const double found = value().item<double>();
      parameter.tensor.sub_(direction, step);
      return found;
    };
    constexpr double kStep = 1e-6;
    const double slope =
        (at_distance(kStep) - at_distance(-kStep)) / (2 * kStep);
    const double expected =
        (parameter.tensor.grad() * direction).sum().item<double>();
    EXPECT_NEAR(slope, expected, 1e-4 * std::max(1.0, std::abs(expected)))
        << parameter.name;
  }
}

TEST_P(DecoderTest, GradientsOfEveryParameterAreThoseOfDifferences) {
  const auto decoder = small_decoder(GetParam());
  const auto x = ids(2, 5), y = ids(2, 5);
  expect_slopes(*decoder, [&] { return decoder->loss(x, y).sum; });
}

// Of a step: all units by what its masks are drawn by.
at::Tensor step_loss(Decoder& decoder, const at::Tensor& x, const at::Tensor& y,
                     const nn::Draw& draw) {
  at::Tensor hidden = x;
  for (int64_t unit = 0; unit < decoder.num_units(); ++unit) {
    hidden = decoder.forward_unit(unit, hidden, {x.size(1), {}, draw});
  }
  return decoder.loss_of(hidden, y).sum;
}

TEST_P(DecoderTest, DropsInStepsAloneAndAsTheyAreDrawn) {
  const auto plain = small_decoder(GetParam()),
             dropping = small_decoder(GetParam(), 0.2);
  const auto x = ids(2, 5), y = ids(2, 5);
  const at::Tensor without = plain->loss(x, y).sum;
  EXPECT_TRUE(at::equal(dropping->loss(x, y).sum, without));
  const auto of = [&](const nn::Draw& draw) {
    return step_loss(*dropping, x, y, draw).item<double>();
  };
  const double once = of({7, 3, 5});
  EXPECT_NE(once, without.item<double>());
  EXPECT_EQ(once, of({7, 3, 5}));
  EXPECT_NE(once, of({8, 3, 5}));
  EXPECT_NE(once, of({7, 4, 5}));
  EXPECT_NE(once, of({7, 3, 7}));
  EXPECT_TRUE(at::equal(step_loss(*plain, x, y, {7, 3, 5}), without));
}

TEST_P(DecoderTest, GradientsBehindMasksAreThoseOfDifferences) {
  const auto decoder = small_decoder(GetParam(), 0.2);
  const auto x = ids(2, 5), y = ids(2, 5);
  const nn::Draw draw{7, 3, 5};
  expect_slopes(*decoder, [&] { return step_loss(*decoder, x, y, draw); });
}

TEST_P(DecoderTest, GreedyGenerationIsTheSameWithAndWithoutCache) {
  const auto decoder = small_decoder(GetParam());
  const std::vector<int64_t> prompt = {3, 14, 15, 9};
  const auto tokens =
      generate(*decoder, prompt,
               {.max_new_tokens = 8, .sampling = {.temperature = 0.0}});
  ASSERT_EQ(tokens.size(), 8u);
  auto all = prompt;
  for (const int64_t token : tokens) {
    const at::NoGradGuard no_grad;
    const auto logits =
        decoder->forward(at::tensor(all, at::kLong).unsqueeze(0));
    EXPECT_EQ(logits.select(1, -1).argmax().item<int64_t>(), token);
    all.push_back(token);
  }
}

TEST_P(DecoderTest, RunsInLowPrecision) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto decoder = small_decoder(GetParam(), 0, type);
    const auto loss = decoder->loss(ids(2, 5), ids(2, 5));
    torch::autograd::backward({loss.sum});
    EXPECT_TRUE(std::isfinite(loss.sum.item<double>()));
    for (const auto& parameter : nn::parameters_of(*decoder)) {
      EXPECT_EQ(parameter.tensor.grad().scalar_type(), type);
    }
  }
}

TEST_P(DecoderTest, RefusesMoreThanMaxSeq) {
  const auto decoder = small_decoder(GetParam());
  EXPECT_NO_THROW(decoder->forward(ids(1, 16)));
  EXPECT_THROW(decoder->forward(ids(1, 17)), tessera::Error);
}

TEST_P(DecoderTest, EveryParameterHasAPlaceOfItsOwnInTheFolder) {
  const auto decoder = small_decoder(GetParam());
  std::set<std::string> places;
  for (const auto& name : parameter_names(*decoder)) {
    const auto source = hugging_face_source(decoder->config(), name);
    places.insert(source.tensor + "#" + std::to_string(source.part));
  }
  EXPECT_EQ(places.size(), parameter_names(*decoder).size());
}

TEST_P(DecoderTest, ConfigJsonReadsBackTheSame) {
  HuggingFaceConfig config{.model = small_model(GetParam()),
                           .dtype = at::kBFloat16,
                           .bos_token = 1,
                           .eos_tokens = {2, 3}};
  config.model.rope_theta = GetParam() == "gpt2" ? 10000.0 : 12345.5;
  const auto back =
      parse_hugging_face_config(hugging_face_config_json(config), "text");
  EXPECT_EQ(hugging_face_config_json(back), hugging_face_config_json(config));
  EXPECT_EQ(back.model.kv_heads, config.model.kv_heads);
  EXPECT_EQ(back.model.rope_theta, config.model.rope_theta);
  EXPECT_EQ(back.dtype, at::kBFloat16);
  EXPECT_EQ(back.bos_token, 1);
  EXPECT_THAT(back.eos_tokens, ::testing::ElementsAre(2, 3));
}

INSTANTIATE_TEST_SUITE_P(Families, DecoderTest,
                         ::testing::Values("gpt2", "llama", "mistral", "qwen2",
                                           "qwen3", "olmo2", "gemma3_text",
                                           "phi3"),
                         [](const auto& info) { return info.param; });

TEST(Decoder, NamesAreOurOwn) {
  Decoder decoder(small_model("qwen3"));
  EXPECT_THAT(
      parameter_names(decoder),
      testing::IsSupersetOf(
          {"embed.tokens.weight", "blocks.1.attention_norm.weight",
           "blocks.1.attention.q.weight", "blocks.1.attention.k_norm.weight",
           "blocks.0.mlp.gate.weight", "final_norm.weight"}));
}

// A module is a layer more, with a way into it and the head's products; the
// first stage's embedding is read where it is, and what the head takes.
TEST(Decoder, ModulesAhead) {
  ModelConfig model = small_model("deepseek_v3");
  model.layers = 3;
  const ModelConfig longer = model;
  model.layers = 2;
  model.mtp.layers = 1;
  const int64_t width = model.hidden, way = 2 * width * width;
  EXPECT_EQ(num_parameters(model), num_parameters(longer) + way + 3 * width);
  EXPECT_EQ(flops_per_token(model, 16),
            flops_per_token(longer, 16) + 6 * (way + model.vocab * width));

  Decoder decoder(model);
  EXPECT_EQ(decoder.num_blocks(), 3);
  EXPECT_FALSE(decoder.is_ahead(2));
  EXPECT_TRUE(decoder.is_ahead(3));
  EXPECT_FALSE(decoder.is_ahead(4));
  std::map<std::string, std::vector<int64_t>> units;
  for (const auto& parameter : nn::parameters_of(decoder)) {
    units[parameter.name] = parameter.spec->units;
  }
  using Units = std::vector<int64_t>;
  EXPECT_EQ(units["embed.tokens.weight"], (Units{0, 3, 4}));
  EXPECT_EQ(units["final_norm.weight"], (Units{4, 3}));
  for (const char* name : {"token_norm", "hidden_norm", "proj", "norm"}) {
    EXPECT_EQ(units[c10::str("blocks.2.mtp.", name, ".weight")], Units{3});
  }
}

TEST(Decoder, UnknownFamiliesAreRefused) {
  ModelConfig config = small_model("llama");
  config.family = "mystery";
  EXPECT_THROW(Decoder{config}, tessera::Error);
}

TEST(Decoder, LayersWithAWindowTurnByABaseOfTheirOwn) {
  ModelConfig config = small_model("gemma3_text");
  EXPECT_TRUE(config.turns_locally(0));
  EXPECT_FALSE(config.turns_locally(1));
  EXPECT_EQ(config.query_scale(), std::sqrt(4.0 / 6.0));
  const auto logits = [](const ModelConfig& of) {
    Decoder decoder(of);
    nn::materialise(decoder, {.seed = 5, .dtype = at::kDouble});
    return decoder.forward(at::arange(16).unsqueeze(0));
  };
  ModelConfig other = config;
  other.rope_theta_local = 60.0;
  EXPECT_FALSE(at::allclose(logits(config), logits(other)));
  other.rope_theta_local = 0;
  other.rope_theta = 50.0;
  config.rope_theta = 50.0;
  EXPECT_TRUE(at::equal(logits(config), logits(other)));
}

}  // namespace
}  // namespace tessera::models
