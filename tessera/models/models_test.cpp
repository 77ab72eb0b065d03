#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <map>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/models/decoder.h"
#include "tessera/models/generate.h"
#include "tessera/models/hugging_face_config.h"
#include "tessera/models/hugging_face_names.h"
#include "tessera/models/trace/model_facts.h"
#include "tests/support/experts.h"

namespace tessera::models {
namespace {

ModelConfig small(const std::string& family) {
  ModelConfig config;
  config.family = family;
  config.layers = 2;
  config.hidden = 12;
  config.heads = 3;
  config.kv_heads = family == "gpt2" || family == "deepseek_v3" ? 3 : 1;
  config.ffn = 20;
  config.vocab = 31;
  config.max_seq = 16;
  config.tie_embeddings = family != "llama";
  config.window = family == "mistral" ? 3 : 0;
  if (family == "gemma3_text") {
    config.query_pre_attn_scalar = 6;
    config.window = 3;
    config.window_every = 2;
    config.rope_theta_local = 50.0;
  }
  config.complete();
  return config;
}

std::shared_ptr<Decoder> make(const std::string& family, double dropout = 0,
                              at::ScalarType type = at::kDouble) {
  ModelConfig config = small(family);
  config.dropout = dropout;
  auto decoder = std::make_shared<Decoder>(config);
  nn::materialise(*decoder, {.seed = 5, .dtype = type});
  // Far from the start, where all logits are nearly equal.
  const at::NoGradGuard no_grad;
  for (auto& parameter : nn::parameters_of(*decoder)) {
    parameter.tensor.mul_(parameter.tensor.dim() == 2 ? 20.0 : 1.0);
  }
  return decoder;
}

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
  const auto decoder = make(GetParam());
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
  const auto decoder = make(GetParam());
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
  const auto plain = make(GetParam()), dropping = make(GetParam(), 0.2);
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
  const auto decoder = make(GetParam(), 0.2);
  const auto x = ids(2, 5), y = ids(2, 5);
  const nn::Draw draw{7, 3, 5};
  expect_slopes(*decoder, [&] { return step_loss(*decoder, x, y, draw); });
}

TEST_P(DecoderTest, GreedyGenerationIsTheSameWithAndWithoutCache) {
  const auto decoder = make(GetParam());
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
    const auto decoder = make(GetParam(), 0, type);
    const auto loss = decoder->loss(ids(2, 5), ids(2, 5));
    torch::autograd::backward({loss.sum});
    EXPECT_TRUE(std::isfinite(loss.sum.item<double>()));
    for (const auto& parameter : nn::parameters_of(*decoder)) {
      EXPECT_EQ(parameter.tensor.grad().scalar_type(), type);
    }
  }
}

TEST_P(DecoderTest, RefusesMoreThanMaxSeq) {
  const auto decoder = make(GetParam());
  EXPECT_NO_THROW(decoder->forward(ids(1, 16)));
  EXPECT_THROW(decoder->forward(ids(1, 17)), tessera::Error);
}

TEST_P(DecoderTest, EveryParameterHasAPlaceOfItsOwnInTheFolder) {
  const auto decoder = make(GetParam());
  std::set<std::string> places;
  for (const auto& name : parameter_names(*decoder)) {
    const auto source = hugging_face_source(decoder->config(), name);
    places.insert(source.tensor + "#" + std::to_string(source.part));
  }
  EXPECT_EQ(places.size(), parameter_names(*decoder).size());
}

TEST_P(DecoderTest, ConfigJsonReadsBackTheSame) {
  HuggingFaceConfig config{.model = small(GetParam()),
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
  Decoder decoder(small("qwen3"));
  EXPECT_THAT(
      parameter_names(decoder),
      testing::IsSupersetOf(
          {"embed.tokens.weight", "blocks.1.attention_norm.weight",
           "blocks.1.attention.q.weight", "blocks.1.attention.k_norm.weight",
           "blocks.0.mlp.gate.weight", "final_norm.weight"}));
}

// GPT-2's published sizes: 124,439,808 parameters.
TEST(Decoder, CountsTheParametersOfGpt2) {
  ModelConfig config;
  config.family = "gpt2";
  config.layers = 12;
  config.hidden = 768;
  config.heads = 12;
  config.vocab = 50257;
  config.max_seq = 1024;
  EXPECT_EQ(num_parameters(config), 124439808);
  // 12 layers of 12 * 768^2 weights, and the tied head.
  const int64_t multiplied = 12 * 12 * 768 * 768 + 50257 * 768;
  EXPECT_EQ(flops_per_token(config, 1024),
            6 * multiplied + 12 * 12 * 12 * 64 * 1024);
}

// Mixtral 8x7B: 46.7 billion parameters, of which 12.9 work on a token.
TEST(Decoder, ExpertsOfMixtral) {
  ModelConfig config;
  config.family = "mixtral";
  config.layers = 32;
  config.hidden = 4096;
  config.heads = 32;
  config.kv_heads = 8;
  config.ffn = 14336;
  config.vocab = 32000;
  config.max_seq = 32768;
  config.tie_embeddings = false;
  EXPECT_EQ(num_parameters(config), 46702792704);
  EXPECT_EQ(num_expert_parameters(config), int64_t{32} * 8 * 3 * 4096 * 14336);
  const int64_t active = 46702792704 - int64_t{32} * 6 * 3 * 4096 * 14336;
  EXPECT_EQ(active, 12879925248);
  EXPECT_EQ(count_parameters(config).active, active);
  EXPECT_EQ(describe(config),
            "mixtral, 46.7B parameters, 12.9B of them active");
  const int64_t norms = (2 * 32 + 1) * 4096, lookup = 32000 * 4096;
  EXPECT_EQ(flops_per_token(config, 0), 6 * (active - norms - lookup));

  config.layers = 4;
  config.moe.every = 2;
  config.complete();
  EXPECT_EQ(config.layers_with_experts(), 2);
  EXPECT_FALSE(config.has_experts(0));
  EXPECT_TRUE(config.has_experts(3));
}

// A module is a layer more, with a way into it and the head's products; the
// first stage's embedding is read where it is, and what the head takes.
TEST(Decoder, ModulesAhead) {
  ModelConfig model = small("deepseek_v3");
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

TEST(Decoder, ModulesAheadAreLikeTheLastLayer) {
  ModelConfig model = small("deepseek_v3");
  model.layers = 4;
  model.moe.every = 2;
  model.mtp.layers = 2;
  model.complete();
  EXPECT_TRUE(model.has_experts(4));
  EXPECT_TRUE(model.has_experts(5));
  EXPECT_EQ(model.layers_with_experts(), 4);
  EXPECT_EQ(model.layers_with_experts(4), 2);
  EXPECT_EQ(model.layers_with_experts(5), 3);
  model.layers = 3;
  EXPECT_FALSE(model.has_experts(4));
  EXPECT_EQ(model.layers_with_experts(), 1);
}

TEST(Decoder, ModulesAheadInFolders) {
  ModelConfig model = small("deepseek_v3");
  model.mtp.layers = 1;
  model.complete();
  const auto place = [&](const char* name) {
    return hugging_face_source(model, name).tensor;
  };
  EXPECT_EQ(place("blocks.2.mtp.proj.weight"), "model.layers.2.eh_proj.weight");
  EXPECT_EQ(place("blocks.2.mtp.norm.weight"),
            "model.layers.2.shared_head.norm.weight");
  const auto copies = hugging_face_copies(model);
  ASSERT_EQ(copies.size(), 2U);
  EXPECT_EQ(copies[0].tensor, "model.layers.2.embed_tokens.weight");
  EXPECT_EQ(copies[1].tensor, "model.layers.2.shared_head.head.weight");
  EXPECT_EQ(copies[1].parameter, "embed.tokens.weight");  // tied
  EXPECT_FALSE(is_of_module_left_out(model, copies[0].tensor));
  model.mtp.layers = 0;
  EXPECT_TRUE(is_of_module_left_out(model, copies[0].tensor));
  EXPECT_FALSE(is_of_module_left_out(model, "model.layers.1.enorm.weight"));
}

TEST(Decoder, UnknownFamiliesAreRefused) {
  ModelConfig config = small("llama");
  config.family = "mystery";
  EXPECT_THROW(Decoder{config}, tessera::Error);
}

TEST(Decoder, WindowsOfLayers) {
  ModelConfig config = small("qwen3");
  config.layers = 12;
  config.window = 5;
  config.complete();
  const auto full = [&] {
    std::vector<int64_t> layers;
    for (int64_t i = 0; i < config.layers; ++i) {
      if (config.window_of(i) == 0) layers.push_back(i);
    }
    return layers;
  };
  EXPECT_THAT(full(), ::testing::IsEmpty());
  config.window_every = 6;
  EXPECT_THAT(full(), ::testing::ElementsAre(5, 11));
  config.window_first_full = 2;
  EXPECT_THAT(full(), ::testing::ElementsAre(0, 1, 5, 11));

  const ModelConfig plain = small("qwen3");
  const auto flops = [](ModelConfig of, int64_t window) {
    of.window = window;
    return flops_per_token(of, 16);
  };
  const int64_t each = 6 * plain.heads * 2 * plain.head_dim * plain.layers;
  EXPECT_EQ(flops(plain, 0) - flops(plain, 5), 11 * each);
  EXPECT_EQ(flops(plain, 0), flops(plain, 40));
}

TEST(Decoder, WindowsThatDoNotFitAreRefused) {
  const auto refused = [](const char* family, int64_t window, int64_t every,
                          int64_t first_full) {
    ModelConfig config = small(family);
    config.window = window;
    config.window_every = every;
    config.window_first_full = first_full;
    EXPECT_THROW(config.complete(), tessera::Error) << family << every;
  };
  refused("llama", 4, 0, 0);
  refused("mistral", 4, 2, 0);
  refused("mistral", 4, 0, 1);
  refused("qwen2", 4, 1, 0);
  refused("qwen2", 4, 0, 2);
  small("llama").complete();
}

// What says which layers have one, in config.json and back.
TEST(Decoder, PatternsOfWindows) {
  const auto read = [](const std::string& more, const char* family = "qwen3",
                       int64_t layers = 6) {
    ModelConfig config = small(family);
    config.layers = layers;
    auto said = tessera::detail::parse_json(
        hugging_face_config_json({.model = config}), "text");
    said.update(tessera::detail::parse_json("{" + more + "}", "more"));
    return parse_hugging_face_config(said.dump(), "text").model;
  };
  const auto expect = [](const ModelConfig& found, int64_t window,
                         int64_t every, int64_t first_full) {
    EXPECT_EQ(found.window, window);
    EXPECT_EQ(found.window_every, every);
    EXPECT_EQ(found.window_first_full, first_full);
    const auto back = parse_hugging_face_config(
        hugging_face_config_json({.model = found}), "text");
    EXPECT_EQ(back.model.window, window);
    EXPECT_EQ(back.model.window_every, every);
    EXPECT_EQ(back.model.window_first_full, first_full);
  };
  const std::string in_use = R"("use_sliding_window": true)";
  const std::string four = in_use + R"(, "sliding_window": 4)";
  expect(read(four), 0, 0, 0);  // behind 28 layers
  expect(read(four + R"(, "max_window_layers": 2)"), 4, 0, 2);
  expect(read(four + R"(, "max_window_layers": 0)"), 4, 0, 0);
  expect(read(in_use + R"(, "max_window_layers": 0)"), 4096, 0, 0);
  expect(read(R"("sliding_window": 4, "max_window_layers": 0)"), 0, 0, 0);
  const auto listed = [&](const std::string& layers) {
    std::string types;
    for (const char layer : layers) {
      types +=
          std::string(types.empty() ? "" : ", ") +
          (layer == 's' ? R"("sliding_attention")" : R"("full_attention")");
    }
    return four + R"(, "layer_types": [)" + types + "]";
  };
  expect(read(listed("ssssss")), 4, 0, 0);
  expect(read(listed("sfsfsf")), 4, 2, 0);
  expect(read(listed("sssssf")), 4, 6, 0);
  expect(read(listed("ffssss")), 4, 0, 2);
  expect(read(listed("ffsfss")), 4, 4, 2);
  expect(read(listed("ffffff")), 0, 0, 0);
  EXPECT_THROW(read(listed("sffsss")), tessera::Error);
  EXPECT_THROW(read(listed("sss")), tessera::Error);
  expect(read(R"("sliding_window": null)", "mistral"), 0, 0, 0);
  expect(read(R"("sliding_window": 8)", "mistral"), 8, 0, 0);
  expect(read(R"("sliding_window": 8)", "mixtral"), 8, 0, 0);
  EXPECT_THROW(read(listed("sfsfsf"), "mistral"), tessera::Error);
  EXPECT_THROW(read(four, "llama"), tessera::Error);
}

TEST(Generate, TheSameSeedGivesTheSameTextAndOptionsNarrowIt) {
  const auto decoder = make("llama");
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
  const auto decoder = make("gpt2");
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
  const auto decoder = make("llama");
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
  const auto decoder = make("llama");
  EXPECT_THROW(generate(*decoder, {}, {}), tessera::Error);
  EXPECT_THROW(generate(*decoder, std::vector<int64_t>(16, 1), {}),
               tessera::Error);
  EXPECT_THROW(generate(*decoder, {1}, {.sampling = {.temperature = -1.0}}),
               tessera::Error);
  EXPECT_THROW(generate(*decoder, {1}, {.sampling = {.top_p = 0.0}}),
               tessera::Error);
}

TEST(HuggingFaceSource, BoxesOfAConv1dAreTurnedAndOffset) {
  const ModelConfig gpt2 = small("gpt2");  // of width 12
  const auto v = hugging_face_source(gpt2, "blocks.11.attention.v.weight");
  EXPECT_EQ(v.tensor, "transformer.h.11.attn.c_attn.weight");
  EXPECT_THAT(v.stored_shape({12, 12}), ::testing::ElementsAre(12, 36));
  const mesh::Box stored = v.stored_box({{2, 1}, {3, 4}});
  EXPECT_EQ(stored, (mesh::Box{{1, 26}, {4, 3}}));
  const auto bias = hugging_face_source(gpt2, "blocks.11.attention.k.bias");
  EXPECT_THAT(bias.stored_shape({12}), ::testing::ElementsAre(36));
  EXPECT_EQ(bias.stored_box({{2}, {3}}), (mesh::Box{{14}, {3}}));
}

// q of 12 rows, k and v of 4 each; gate and up of 20.
TEST(HuggingFaceSource, PartsMayBeUnequal) {
  const ModelConfig phi = small("phi3");
  const auto source = [&](const char* name) {
    return hugging_face_source(phi, std::string("blocks.1.") + name);
  };
  const auto q = source("attention.q.weight"), v = source("attention.v.weight");
  EXPECT_EQ(q.tensor, "model.layers.1.self_attn.qkv_proj.weight");
  EXPECT_EQ(v.tensor, q.tensor);
  EXPECT_THAT(q.stored_shape({12, 12}), ::testing::ElementsAre(20, 12));
  EXPECT_THAT(v.stored_shape({4, 12}), ::testing::ElementsAre(20, 12));
  EXPECT_EQ(q.stored_box({{2, 0}, {3, 12}}), (mesh::Box{{2, 0}, {3, 12}}));
  EXPECT_EQ(v.stored_box({{2, 1}, {2, 4}}), (mesh::Box{{18, 1}, {2, 4}}));
  const auto up = source("mlp.up.weight");
  EXPECT_EQ(up.tensor, "model.layers.1.mlp.gate_up_proj.weight");
  EXPECT_EQ(up.stored_box({{5, 0}, {5, 12}}), (mesh::Box{{25, 0}, {5, 12}}));
}

TEST(Decoder, LayersWithAWindowTurnByABaseOfTheirOwn) {
  ModelConfig config = small("gemma3_text");
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

TEST(Decoder, KeysOfOtherFamiliesAreRefused) {
  const auto expect_refused = [](const std::string& family, auto change,
                                 const char* named) {
    ModelConfig config = small(family);
    change(config);
    try {
      config.complete();
      FAIL() << named << " was accepted";
    } catch (const tessera::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(), ::testing::HasSubstr(named));
    }
  };
  expect_refused(
      "llama", [](ModelConfig& of) { of.query_pre_attn_scalar = 5; },
      "model.query_pre_attn_scalar is 5, but scores of model.family llama");
  expect_refused(
      "llama", [](ModelConfig& of) { of.rope_theta_local = 5; },
      "model.rope_theta_local is 5, but all layers of model.family llama");
  expect_refused(
      "gemma3_text", [](ModelConfig& of) { of.rope_theta_local = 0.5; },
      "model.rope_theta_local is 0.5; a base must be above 1");
  expect_refused(
      "gemma3_text", [](ModelConfig& of) { of.window = 0; },
      "model.rope_theta_local is 50, but no layer has a window");
}

// The keys of folders as they are published, from before rope_parameters.
TEST(HuggingFaceConfigOf, Gemma3) {
  const auto read = [](const std::string& more) {
    return parse_hugging_face_config(
               R"({"model_type": "gemma3_text", "attention_bias": false,
                   "attn_logit_softcapping": null,
                   "final_logit_softcapping": null, "head_dim": 256,
                   "hidden_activation": "gelu_pytorch_tanh",
                   "hidden_size": 1152, "intermediate_size": 6912,
                   "max_position_embeddings": 32768,
                   "num_attention_heads": 4, "num_hidden_layers": 26,
                   "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
                   "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
                   "rope_theta": 1000000, "sliding_window": 512,
                   "sliding_window_pattern": 6, "vocab_size": 262144, )" +
                   more + "}",
               "config.json")
        .model;
  };
  const ModelConfig one = read(R"("rope_scaling": null)");
  EXPECT_EQ(num_parameters(one), 999885952);  // of 1 billion
  EXPECT_EQ(one.window_of(4), 512);
  EXPECT_EQ(one.window_of(5), 0);
  EXPECT_EQ(one.rope_theta, 1e6);
  EXPECT_EQ(one.rope_theta_local, 1e4);
  EXPECT_TRUE(one.tie_embeddings);
  EXPECT_EQ(one.query_scale(), 1);
  const ModelConfig longer =
      read(R"("rope_scaling": {"factor": 8.0, "rope_type": "linear"})");
  EXPECT_EQ(longer.rope_scaling.type, "linear");
  EXPECT_EQ(longer.rope_scaling.factor, 8);
  EXPECT_EQ(longer.rope_theta_local, 1e4);
}

TEST(HuggingFaceConfigOf, Phi4) {
  const auto config = parse_hugging_face_config(
      R"({"model_type": "phi3", "attention_bias": false, "embd_pdrop": 0.0,
          "hidden_act": "silu", "hidden_size": 5120,
          "intermediate_size": 17920, "max_position_embeddings": 16384,
          "num_attention_heads": 40, "num_hidden_layers": 40,
          "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
          "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null,
          "rope_theta": 250000, "sliding_window": null,
          "tie_word_embeddings": false, "vocab_size": 100352})",
      "config.json");
  EXPECT_EQ(num_parameters(config.model), 14659507200);
  EXPECT_EQ(config.model.rope_theta, 250000);
  EXPECT_EQ(config.model.window, 0);
}

// What a folder leaves out is transformers' default of that family.
TEST(HuggingFaceConfigOf, MixtralWithSizesAlone) {
  const ModelConfig config =
      parse_hugging_face_config(
          R"({"model_type": "mixtral", "vocab_size": 50, "hidden_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 16,
              "num_local_experts": 4,
              "intermediate_size": 4, "max_position_embeddings": 32})",
          "config.json")
          .model;
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.norm_eps, 1e-5);
  EXPECT_EQ(config.kv_heads, 8);
}

// Each size by itself is one that may be.
TEST(ModelConfigOf, MoreParametersThanCanBeCountedAreRefused) {
  ModelConfig config;
  config.layers = 10000;
  config.hidden = config.ffn = 1 << 24;
  config.heads = 1 << 10;
  try {
    config.complete();
    FAIL() << "was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(error.what_without_backtrace(),
                ::testing::HasSubstr("can be counted"));
  }
}

std::string refusal_of(ModelConfig config) {
  try {
    config.complete();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// In latent attention, and in the blocks of modules ahead.
TEST(ModelConfigOf, EveryMatrixIsCounted) {
  ModelConfig config;
  config.family = "deepseek_v3";
  config.hidden = 4096;
  config.heads = 1 << 10;
  config.head_dim = 128;
  config.layers = 100;
  EXPECT_EQ(refusal_of(config), "");
  config.latent.kv_rank = 1 << 24;  // 3e12 in a layer
  EXPECT_EQ(refusal_of(config), "");
  config.layers = 320;
  EXPECT_EQ(refusal_of(config), "");
  config.mtp.layers = 64;
  EXPECT_THAT(refusal_of(config), ::testing::HasSubstr("can be counted"));
}

TEST(ModelConfigOf, MoreOperationsThanCanBeCountedAreRefused) {
  ModelConfig config;
  config.layers = 10000;
  config.hidden = 64;
  config.heads = 1 << 20;
  config.head_dim = 2;
  EXPECT_EQ(refusal_of(config), "");
  config.max_seq = 1 << 24;
  EXPECT_THAT(refusal_of(config),
              ::testing::HasSubstr("attention of a token over model.max_seq "
                                   "16777216 takes some"));
}

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

// Where a folder has no tokenizer that says it, and transformers' own default
// is a token.
TEST(HuggingFaceConfigOf, NoTokenIsPaddingUnlessItIsSaid) {
  for (const char* family : {"olmo2", "gemma3_text", "phi3"}) {
    EXPECT_THAT(hugging_face_config_json({.model = small(family)}),
                ::testing::HasSubstr("\"pad_token_id\": null"))
        << family;
  }
}

TEST(HuggingFaceConfigOf, QwenWithSizesAlone) {
  const auto read = [](const std::string& family, const std::string& more) {
    return parse_hugging_face_config(
               R"({"model_type": ")" + family +
                   R"(", "vocab_size": 50, "hidden_size": 128,
                   "num_hidden_layers": 2, "num_attention_heads": 64,
                   "intermediate_size": 4, "max_position_embeddings": 32)" +
                   more + "}",
               "config.json")
        .model;
  };
  const ModelConfig config = read("qwen3", "");
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.kv_heads, 32);
  EXPECT_EQ(read("qwen2", R"(, "num_key_value_heads": 4)").kv_heads, 4);
  EXPECT_EQ(read("qwen2", "").head_dim, 2);
  // As many as heads.
  EXPECT_EQ(read("qwen3", R"(, "num_key_value_heads": null)").kv_heads, 64);
}

TEST(HuggingFaceConfigOf, AnEmptyScalingIsNone) {
  const ModelConfig config =
      parse_hugging_face_config(
          R"({"model_type": "llama", "vocab_size": 50, "hidden_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 4, "max_position_embeddings": 32,
              "rope_scaling": {}, "rope_parameters": {
                "rope_type": "linear", "factor": 4.0, "rope_theta": 7.0}})",
          "config.json")
          .model;
  EXPECT_EQ(config.rope_scaling.factor, 4);
  EXPECT_EQ(config.rope_theta, 7);
}

// A folder that others made, with one more key, whose sequences get longer.
TEST(HuggingFaceConfigOf, LongerSequences) {
  const auto text = [](const std::string& key) {
    return R"({"model_type": "llama", "vocab_size": 5, "hidden_size": 8,
               "num_hidden_layers": 4, "num_attention_heads": 4,
               "intermediate_size": 4, "max_position_embeddings": 32,
               "house_key": 7, )" +
           key + "}";
  };
  const auto updated = [](const std::string& before,
                          const HuggingFaceConfig& config) {
    return updated_hugging_face_config(before, "config.json", config);
  };
  const std::string plain = text(R"("rope_theta": 50.0)");
  auto config = parse_hugging_face_config(plain, "config.json");
  EXPECT_EQ(updated(plain, config), plain);
  config.model.max_seq = 64;
  config.model.rope_scaling.type = "yarn";
  config.model.rope_scaling.factor = 2;
  config.model.rope_scaling.original_max_seq = 32;
  const std::string longer = updated(plain, config);
  EXPECT_THAT(longer, ::testing::HasSubstr("\"house_key\": 7"));
  const auto back = parse_hugging_face_config(longer, "config.json").model;
  EXPECT_EQ(back.max_seq, 64);
  EXPECT_EQ(back.rope_theta, 50);
  EXPECT_EQ(back.rope_scaling, config.model.rope_scaling);

  // A factor, and a length before, that max_position_embeddings gave.
  for (const std::string key :
       {R"("original_max_position_embeddings": 16,
           "rope_scaling": {"type": "yarn"})",
        R"("rope_scaling": {"type": "yarn", "factor": 4.0})",
        R"("rope_parameters": {"rope_type": "llama3", "factor": 4.0})"}) {
    config = parse_hugging_face_config(text(key), "config.json");
    config.model.max_seq = 48;
    const auto again =
        parse_hugging_face_config(updated(text(key), config), "config.json")
            .model;
    EXPECT_EQ(again.max_seq, 48) << key;
    EXPECT_EQ(again.rope_scaling, config.model.rope_scaling) << key;
  }
}

struct BadConfig {
  std::string name;
  std::string json;
  std::string named;  // in the message
};

// With one more key.
std::string gemma3(const std::string& key) {
  return R"({"model_type": "gemma3_text", "vocab_size": 5, "hidden_size": 8,
             "num_hidden_layers": 4, "num_attention_heads": 4,
             "intermediate_size": 4, "max_position_embeddings": 8, )" +
         key + "}";
}
std::string phi3(const std::string& key) {
  return R"({"model_type": "phi3", "vocab_size": 5, "hidden_size": 8,
             "num_hidden_layers": 4, "num_attention_heads": 4,
             "intermediate_size": 4, "max_position_embeddings": 8, )" +
         key + "}";
}

// As transformers reads an object of each kind of layer.
TEST(HuggingFaceConfigOf, YarnOfGemma3) {
  const auto read = [](const std::string& more) {
    return parse_hugging_face_config(
               gemma3(R"("original_max_position_embeddings": 2,
                         "rope_parameters": {"truncate": false,
                           "full_attention": {"rope_type": "yarn",
                                              "factor": 2.0)" +
                      more + "}}"),
               "config.json")
        .model;
  };
  const ModelConfig config = read(R"(, "original_max_position_embeddings": 4)");
  EXPECT_EQ(config.rope_scaling.original_max_seq, 4);
  EXPECT_FALSE(config.rope_scaling.truncate);
  EXPECT_EQ(read("").rope_scaling.original_max_seq, 8);
  const auto back = parse_hugging_face_config(
      hugging_face_config_json({.model = config}), "text");
  EXPECT_EQ(back.model.rope_scaling, config.rope_scaling);
}

class BadConfigTest : public ::testing::TestWithParam<BadConfig> {};

TEST_P(BadConfigTest, IsRefusedByName) {
  try {
    parse_hugging_face_config(GetParam().json, "config.json");
    FAIL() << "was accepted";
  } catch (const tessera::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                ::testing::HasSubstr(GetParam().named));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, BadConfigTest,
    ::testing::Values(
        BadConfig{"no_object", "[]", "object"},
        BadConfig{"no_type", "{}", "model_type"},
        BadConfig{"no_size", R"({"model_type": "gpt2", "vocab_size": 5})",
                  "n_layer"},
        BadConfig{"negative_size",
                  R"({"model_type": "gpt2", "vocab_size": -5})", "vocab_size"},
        BadConfig{"broken_size", R"({"model_type": "gpt2", "vocab_size": 5.5})",
                  "vocab_size"},
        BadConfig{"huge_size", R"({"model_type": "gpt2", "vocab_size": 1e30})",
                  "vocab_size"},
        BadConfig{
            "too_large",
            R"({"model_type": "gpt2", "vocab_size": 4611686018427387904})",
            "vocab_size"},
        BadConfig{"too_many_layers",
                  R"({"model_type": "gpt2", "vocab_size": 5,
                      "n_layer": 16777216})",
                  "n_layer is 16777216; it must be at most 10000"},
        BadConfig{"negative_epsilon",
                  R"({"model_type": "gpt2", "vocab_size": 5, "n_layer": 1,
                      "n_embd": 4, "n_head": 1, "n_positions": 4,
                      "layer_norm_epsilon": -1})",
                  "layer_norm_epsilon is -1; it must be above 0"},
        BadConfig{"gpt_oss", R"({"model_type": "gpt_oss"})", "MXFP4"},
        BadConfig{"softcapping", gemma3("\"attn_logit_softcapping\": 50.0"),
                  "attn_logit_softcapping is 50.0, which is not supported"},
        BadConfig{"softcapping_of_logits",
                  gemma3("\"final_logit_softcapping\": 30.0"),
                  "final_logit_softcapping is 30.0, which is not supported"},
        BadConfig{"both_ways", gemma3("\"use_bidirectional_attention\": true"),
                  "use_bidirectional_attention is true"},
        BadConfig{"another_gate", gemma3("\"hidden_activation\": \"gelu\""),
                  "hidden_activation is \"gelu\""},
        BadConfig{"no_pattern", gemma3(R"("layer_types": ["sliding_attention",
                            "full_attention", "full_attention",
                            "sliding_attention"])"),
                  "layer_types is [\"sliding_attention\",\"full"},
        BadConfig{"unknown_layers",
                  gemma3(R"("layer_types": ["linear_attention",
                            "full_attention", "full_attention",
                            "full_attention"])"),
                  "layer_types is [\"linear_attention\""},
        BadConfig{"too_few_layers",
                  gemma3(R"("layer_types": ["full_attention"])"),
                  "layer_types is [\"full_attention\"]"},
        BadConfig{"scaled_windows", gemma3(R"("rope_parameters": {
                      "sliding_attention": {"rope_type": "linear",
                                            "factor": 2.0}})"),
                  "sliding_attention: rope_type is \"linear\""},
        BadConfig{"truncate_of_a_kind", gemma3(R"("rope_parameters": {
                      "full_attention": {"rope_type": "yarn", "factor": 2.0,
                                         "truncate": false}})"),
                  "full_attention: truncate is false, which is not supported"},
        BadConfig{"truncate_of_a_scaling", gemma3(R"("rope_scaling": {
                      "rope_type": "yarn", "factor": 2.0, "truncate": false})"),
                  "full_attention: truncate is false"},
        BadConfig{"longrope", phi3(R"("rope_scaling": {"type": "longrope",
                      "short_factor": [1.0], "long_factor": [1.0]})"),
                  "rope_scaling: type is \"longrope\", whose frequencies "
                  "change with the length"},
        BadConfig{"scaled_phi", phi3(R"("rope_parameters":
                      {"rope_type": "yarn", "factor": 2.0})"),
                  "rope_parameters: rope_type is \"yarn\""},
        BadConfig{"partial_rotary", phi3("\"partial_rotary_factor\": 0.75"),
                  "partial_rotary_factor is 0.75, which is not supported"},
        BadConfig{"nul", std::string("{}\0{}", 5), "a NUL byte"},
        BadConfig{"not_json", "{\"model_type\": ", "config.json"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::models
