#include "tessera/optim/optimizer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kSteps = 50;

// A matrix that decays and a vector that does not, with sizes that leave a tail
// behind the kernels' vectors.
std::vector<at::Tensor> example_parameters(at::ScalarType type) {
  at::manual_seed(1);
  return {at::randn({17, 5}, at::kDouble).to(type),
          at::randn({13}, at::kDouble).to(type)};
}

std::vector<FlatSegment> segments_of(const std::vector<at::Tensor>& tensors) {
  std::vector<FlatSegment> segments;
  for (size_t i = 0; i < tensors.size(); ++i) {
    segments.push_back({"p" + std::to_string(i), tensors[i],
                        at::zeros_like(tensors[i]), tensors[i].dim() >= 2});
  }
  return segments;
}

std::vector<at::Tensor> clones(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.detach().clone().requires_grad_());
  }
  return copies;
}

double learning_rate(int step) { return 0.01 / (1 + step % 7); }

// Runs both from the same start with the same gradients; returns the largest
// difference, relative to the parameters' norm.
template <typename TorchOptions>
double difference_after_steps(Optimizer& ours, torch::optim::Optimizer& torchs,
                              const std::vector<at::Tensor>& reference) {
  at::manual_seed(2);
  for (int step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < reference.size(); ++i) {
      const FlatSegment& segment = ours.segments()[i];
      const at::Tensor gradient = at::randn_like(segment.gradient);
      segment.gradient.copy_(gradient);
      reference[i].mutable_grad() = gradient;
    }
    for (auto& group : torchs.param_groups()) {
      static_cast<TorchOptions&>(group.options()).lr(learning_rate(step));
    }
    ours.step(learning_rate(step));
    torchs.step();
  }
  double worst = 0.0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const at::Tensor expected = reference[i].detach();
    const at::Tensor error = ours.segments()[i].parameter - expected;
    worst = std::max(worst, (error.norm() / expected.norm()).item<double>());
  }
  return worst;
}

// One group a parameter: decay where it has two dims.
template <typename TorchOptions>
std::vector<torch::optim::OptimizerParamGroup> groups_of(
    const std::vector<at::Tensor>& parameters, const TorchOptions& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const at::Tensor& parameter : parameters) {
    auto own = std::make_unique<TorchOptions>(options);
    if (parameter.dim() < 2) own->weight_decay(0.0);
    groups.emplace_back(std::vector<at::Tensor>{parameter}, std::move(own));
  }
  return groups;
}

OptimizerConfig adamw_config(std::vector<double> betas = {0.9, 0.999},
                             double eps = 1e-8, double weight_decay = 0.01) {
  return {.type = "adamw",
          .betas = std::move(betas),
          .eps = eps,
          .weight_decay = weight_decay};
}

OptimizerConfig sgd_config(double momentum = 0.0, double weight_decay = 0.0) {
  return {.type = "sgd", .momentum = momentum, .weight_decay = weight_decay};
}

// TorchOptions: those of an Adam.
template <typename Torch, typename TorchOptions>
double adam_difference(at::ScalarType type, const OptimizerConfig& config) {
  const auto parameters = example_parameters(type);
  const auto reference = clones(parameters);
  const auto ours = make_optimizer(config, segments_of(parameters));
  const auto torch_options = TorchOptions(0.0)
                                 .betas({config.betas[0], config.betas[1]})
                                 .eps(config.eps)
                                 .weight_decay(config.weight_decay);
  Torch torchs(groups_of(reference, torch_options));
  return difference_after_steps<TorchOptions>(*ours, torchs, reference);
}

double sgd_difference(at::ScalarType type, const OptimizerConfig& config) {
  const auto parameters = example_parameters(type);
  const auto reference = clones(parameters);
  const auto ours = make_optimizer(config, segments_of(parameters));
  const auto torch_options = torch::optim::SGDOptions(0.0)
                                 .momentum(config.momentum)
                                 .weight_decay(config.weight_decay);
  // A group's option that has its default is overridden by these.
  const torch::optim::SGDOptions defaults(0.0);
  torch::optim::SGD torchs(groups_of(reference, torch_options), defaults);
  return difference_after_steps<torch::optim::SGDOptions>(*ours, torchs,
                                                          reference);
}

// Rounding alone: the fused kernels sum in another order than torch::optim.
TEST(AdamW, EqualsTorchOverFiftySteps) {
  const auto difference =
      adam_difference<torch::optim::AdamW, torch::optim::AdamWOptions>;
  for (const OptimizerConfig& config :
       {adamw_config(), adamw_config({0.9, 0.95}, 1e-8, 0.1),
        adamw_config({0.5, 0.7}, 1e-3, 0.0),
        adamw_config({0.0, 0.9}, 1e-6, 0.3)}) {
    EXPECT_LT(difference(at::kDouble, config), 1e-14);
    EXPECT_LT(difference(at::kFloat, config), 1e-6);
  }
}

TEST(Adam, EqualsTorchOverFiftySteps) {
  const auto difference =
      adam_difference<torch::optim::Adam, torch::optim::AdamOptions>;
  for (OptimizerConfig config :
       {adamw_config(), adamw_config({0.5, 0.7}, 1e-3, 0.0),
        adamw_config({0.0, 0.9}, 1e-6, 0.3)}) {
    config.type = "adam";
    EXPECT_LT(difference(at::kDouble, config), 1e-14);
    EXPECT_LT(difference(at::kFloat, config), 1e-6);
  }
}

TEST(Sgd, EqualsTorchOverFiftySteps) {
  for (const OptimizerConfig& config :
       {sgd_config(), sgd_config(0.9, 0.0), sgd_config(0.0, 0.1),
        sgd_config(0.95, 0.05)}) {
    EXPECT_LT(sgd_difference(at::kDouble, config), 1e-14);
    EXPECT_LT(sgd_difference(at::kFloat, config), 1e-6);
  }
}

std::unique_ptr<Optimizer> adamw_of(const std::vector<at::Tensor>& parameters) {
  return make_optimizer(adamw_config(), segments_of(parameters));
}

using Part = std::pair<size_t, size_t>;  // the first segment, and how many

void take_steps(Optimizer& optimizer, int first, int last,
                const std::vector<Part>& parts = {}) {
  for (int step = first; step < last; ++step) {
    at::manual_seed(100 + step);
    for (const FlatSegment& segment : optimizer.segments()) {
      segment.gradient.copy_(at::randn(segment.gradient.sizes(), at::kFloat));
    }
    if (parts.empty()) {
      optimizer.step(0.01);
      continue;
    }
    optimizer.begin_step();
    for (const auto& [from, count] : parts) optimizer.step(0.01, from, count);
  }
}

// What a checkpoint does: copy by name, go on.
void expect_resumes_bit_for_bit(at::ScalarType type) {
  const auto whole = example_parameters(type);
  const auto uninterrupted = adamw_of(whole);
  take_steps(*uninterrupted, 0, 7);

  const auto stopped = example_parameters(type);
  const auto before = adamw_of(stopped);
  take_steps(*before, 0, 3);
  std::vector<at::Tensor> resumed;
  for (const at::Tensor& tensor : stopped) resumed.push_back(tensor.clone());
  const auto after = adamw_of(resumed);
  ASSERT_EQ(before->state().size(), after->state().size());
  for (size_t i = 0; i < before->state().size(); ++i) {
    EXPECT_EQ(before->state()[i].name, after->state()[i].name);
    after->state()[i].tensor.copy_(before->state()[i].tensor);
  }
  EXPECT_EQ(after->steps(), 3);
  take_steps(*after, 3, 7);
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(at::equal(whole[i], resumed[i]));
  }
}

TEST(Optimizer, ResumesBitForBitFromItsState) {
  expect_resumes_bit_for_bit(at::kFloat);
  expect_resumes_bit_for_bit(at::kDouble);
  expect_resumes_bit_for_bit(at::kBFloat16);
}

TEST(Optimizer, NamesItsState) {
  const auto optimizer = adamw_of(example_parameters(at::kBFloat16));
  std::vector<std::string> names;
  for (const NamedTensor& item : optimizer->state()) names.push_back(item.name);
  EXPECT_THAT(names, ::testing::ElementsAre("step", "master.p0", "master.p1",
                                            "exp_avg.p0", "exp_avg.p1",
                                            "exp_avg_sq.p0", "exp_avg_sq.p1"));
}

// Every rule, in every type.
TEST(Optimizer, PartsOfAStepEqualTheWholeBitForBit) {
  for (const UpdateRule& rule : update_rules()) {
    const OptimizerConfig config{.type = rule.name, .momentum = 0.9};
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
      at::manual_seed(1);
      std::vector<at::Tensor> whole, parts;
      for (const int64_t size : {85, 13, 1, 40}) {
        whole.push_back(at::randn({size, size % 3 + 1}, at::kFloat).to(type));
        parts.push_back(whole.back().clone());
      }
      const auto at_once = make_optimizer(config, segments_of(whole));
      const auto in_parts = make_optimizer(config, segments_of(parts));
      take_steps(*at_once, 0, 5);
      take_steps(*in_parts, 0, 5, {{3, 1}, {0, 2}, {2, 0}, {2, 1}});
      for (size_t i = 0; i < whole.size(); ++i) {
        EXPECT_TRUE(at::equal(whole[i], parts[i])) << rule.name << i;
      }
      for (size_t i = 0; i < at_once->state().size(); ++i) {
        EXPECT_TRUE(
            at::equal(at_once->state()[i].tensor, in_parts->state()[i].tensor));
      }
    }
  }
}

// By a power of two, which rounds nothing; every rule, in every type.
TEST(Optimizer, GradientsCountTimesTheScaleOfTheStep) {
  for (const UpdateRule& rule : update_rules()) {
    const OptimizerConfig config{.type = rule.name, .momentum = 0.9};
    for (const at::ScalarType type :
         {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const auto scaled = example_parameters(type);
      const auto plain = example_parameters(type);
      const auto by_step = make_optimizer(config, segments_of(scaled));
      const auto before = make_optimizer(config, segments_of(plain));
      for (int step = 0; step < 3; ++step) {
        for (size_t i = 0; i < plain.size(); ++i) {
          const at::Tensor gradient = at::randn_like(plain[i]);
          by_step->segments()[i].gradient.copy_(gradient);
          before->segments()[i].gradient.copy_(gradient * 0.25);
        }
        by_step->begin_step(0.25);
        by_step->step(0.01, 0, scaled.size());
        before->step(0.01);
      }
      for (size_t i = 0; i < plain.size(); ++i) {
        EXPECT_TRUE(at::equal(scaled[i], plain[i])) << rule.name << type << i;
      }
    }
  }
}

TEST(Optimizer, PartsOfAStepThatAreNoStepAreRefused) {
  const auto sgd =
      make_optimizer(sgd_config(), segments_of(example_parameters(at::kFloat)));
  EXPECT_THAT([&] { sgd->step(0.1, 0, 1); },
              ThrowsMessage<Error>(HasSubstr("'p0' was updated already")));
  sgd->begin_step();
  EXPECT_THAT([&] { sgd->step(0.1, 1, 2); },
              ThrowsMessage<Error>(HasSubstr("there are 2 segments, no 2")));
  sgd->step(0.1, 0, 1);
  EXPECT_THAT(
      [&] { sgd->begin_step(); },
      ThrowsMessage<Error>(HasSubstr("'p1' was not updated in step 1")));
  EXPECT_THAT([&] { sgd->step(0.1, 0, 2); },
              ThrowsMessage<Error>(HasSubstr("'p0' was updated already")));
}

// Without a master an update of 1e-4 of the value is below bf16's resolution
// and would be lost each time.
TEST(Optimizer, Bf16ParametersMoveThroughTheirMasters) {
  const at::Tensor low = at::ones({8}, at::kBFloat16);
  const at::Tensor exact = at::ones({8}, at::kFloat);
  const auto low_sgd = make_optimizer(sgd_config(), segments_of({low}));
  const auto exact_sgd = make_optimizer(sgd_config(), segments_of({exact}));
  low_sgd->segments()[0].gradient.fill_(1.0);
  exact_sgd->segments()[0].gradient.fill_(1.0);
  for (int step = 0; step < 100; ++step) {
    low_sgd->step(1e-4);
    exact_sgd->step(1e-4);
  }
  EXPECT_TRUE(at::equal(low, exact.to(at::kBFloat16)));
  EXPECT_LT(low[0].item<double>(), 1.0);
}

TEST(Optimizer, TakesTheGradientFromTheParameterWhereNoneIsNamed) {
  const at::Tensor parameter = at::ones({2, 3}).requires_grad_();
  const auto sgd =
      make_optimizer(sgd_config(), {{"weight", parameter, {}, false}});
  (parameter * 2).sum().backward();
  sgd->step(0.25);
  EXPECT_TRUE(at::equal(parameter.detach(), at::full({2, 3}, 0.5)));
}

// A rank may hold nothing of a parameter.
TEST(Optimizer, EmptySegmentsAreLegal) {
  const auto adamw = make_optimizer(
      {}, {{"shard", at::empty({0, 4}), at::empty({0, 4}), true}});
  adamw->step(0.1);
  EXPECT_EQ(adamw->steps(), 1);
  const auto nothing = make_optimizer({}, {});
  nothing->step(0.1);
  EXPECT_EQ(nothing->steps(), 1);
}

TEST(Optimizer, RefusesWhatItCannotUpdateAndChangesNothing) {
  const at::Tensor first = at::ones({2});
  const at::Tensor second = at::ones({3});
  const auto missing = make_optimizer(
      sgd_config(),
      {{"a", first, at::ones({2}), false}, {"b", second, {}, false}});
  EXPECT_THAT([&] { missing->step(0.1); },
              ThrowsMessage<Error>(HasSubstr("'b' has no gradient")));
  const auto shape =
      make_optimizer(sgd_config(), {{"a", first, at::ones({2}), false},
                                    {"b", second, at::ones({4}), false}});
  EXPECT_THAT([&] { shape->step(0.1); },
              ThrowsMessage<Error>(HasSubstr("its gradient [4]")));
  EXPECT_TRUE(at::equal(first, at::ones({2})));
  EXPECT_EQ(shape->steps(), 0);
}

TEST(Optimizer, RefusesParametersItCannotHold) {
  const at::Tensor floats = at::ones({2});
  const auto make = [](std::vector<FlatSegment> segments) {
    return [segments] { make_optimizer(sgd_config(), segments); };
  };
  EXPECT_THAT(make({{"a", floats, {}, false}, {"a", floats, {}, false}}),
              ThrowsMessage<Error>(HasSubstr("'a' is given twice")));
  EXPECT_THAT(make({{"a", at::ones({2, 3}).t(), {}, false}}),
              ThrowsMessage<Error>(HasSubstr("not contiguous")));
  EXPECT_THAT(make({{"a", at::ones({2}, at::kLong), {}, false}}),
              ThrowsMessage<Error>(HasSubstr("has type Long")));
  EXPECT_THAT(make({{"a", floats, {}, false},
                    {"b", at::ones({2}, at::kDouble), {}, false}}),
              ThrowsMessage<Error>(HasSubstr("'b' is Double")));
}

TEST(Optimizer, IsMadeFromTheConfiguration) {
  OptimizerConfig config;
  config.type = "nothing";
  EXPECT_THAT([&] { make_optimizer(config, {}); },
              ThrowsMessage<Error>(HasSubstr("Use one of adamw, adam")));
  EXPECT_EQ(config.betas.size(), 0);
  config.type = "adamw";
  config.complete();
  EXPECT_THAT(config.betas, ::testing::ElementsAre(0.9, 0.95));
  config.betas = {0.5, 0.6};
  config.complete();
  EXPECT_THAT(config.betas, ::testing::ElementsAre(0.5, 0.6));
}

TEST(UpdateRule, SaysWhatIsKeptAndUsed) {
  for (const UpdateRule& rule : update_rules()) {
    const OptimizerConfig config{.type = rule.name, .momentum = 0.9};
    std::vector<std::string> promised, kept;
    for (const Moment& moment : rule.moments_with(config)) {
      promised.push_back(moment.name + ".p0");
    }
    auto segments = segments_of({at::ones({2, 2}, at::kFloat)});
    segments[0].is_matrix = true;  // or it is another rule's, of muon
    const auto optimizer = make_optimizer(config, std::move(segments));
    for (const NamedTensor& item : optimizer->state()) {
      if (!item.parameter.empty()) kept.push_back(item.name);
    }
    EXPECT_EQ(kept, promised);
    EXPECT_EQ(rule.uses("betas"), !rule.betas.empty()) << rule.name;
    EXPECT_FALSE(rule.source.empty());
  }
  EXPECT_TRUE(update_rule("sgd").moments_with(sgd_config()).empty());
}

// A shard along dim 1 of stacked tensors is updated as if it lay in one piece.
TEST(Optimizer, AShardWhosePartsAreContiguous) {
  at::manual_seed(3);
  const at::Tensor whole = at::randn({3, 5, 4}, at::kDouble);
  const at::Tensor gradient = at::randn({3, 2, 4}, at::kDouble);
  const at::Tensor shard = whole.narrow(1, 2, 2);
  const at::Tensor copy = shard.contiguous();
  for (const char* type : {"adamw", "sgd"}) {
    OptimizerConfig config;
    config.type = type;
    for (const at::Tensor& parameter : {shard, copy}) {
      const auto optimizer =
          make_optimizer(config, {{"p", parameter, gradient, /*decay=*/true}});
      optimizer->step(0.1);
      optimizer->step(0.1);
    }
    EXPECT_TRUE(at::equal(shard, copy)) << type;
  }
  EXPECT_THROW(make_optimizer({}, {{"p", whole.select(2, 0), gradient, true}}),
               Error);
}

// Its master lies in one piece, its gradient as it does.
TEST(Optimizer, AShardInBf16WhosePartsAreContiguous) {
  at::manual_seed(3);
  const at::Tensor whole = at::randn({3, 5, 4}).to(at::kBFloat16);
  const at::Tensor gradients = at::randn({3, 5, 4});
  const at::Tensor shard = whole.narrow(1, 2, 2);
  const at::Tensor copy = shard.clone();
  for (const char* type : {"adamw", "sgd"}) {
    OptimizerConfig config;
    config.type = type;
    for (const at::Tensor& parameter : {shard, copy}) {
      const at::Tensor gradient = gradients.narrow(1, 1, 2);
      const auto optimizer =
          make_optimizer(config, {{"p", parameter, gradient, /*decay=*/true}});
      optimizer->step(0.1);
      optimizer->step(0.1);
    }
    EXPECT_TRUE(at::equal(shard, copy.contiguous())) << type;
  }
}

// Whatever the learning rate, and however the gradient is scaled.
TEST(Optimizer, ABiasOfExpertsStepsByTheGradientsSign) {
  const at::Tensor bias = at::tensor({1.0, 1.0, 1.0}, at::kDouble);
  const at::Tensor excess = at::tensor({4.0, 0.0, -0.5}, at::kDouble);
  const auto optimizer = make_optimizer({}, {{.name = "bias",
                                              .parameter = bias,
                                              .gradient = excess,
                                              .sign_rate = 0.25}});
  optimizer->begin_step(/*gradient_scale=*/0.001);
  optimizer->step(/*lr=*/7.0, 0, 1);
  EXPECT_TRUE(at::equal(bias, at::tensor({0.75, 1.0, 1.25}, at::kDouble)));
}

// As on a stage of a pipeline where nothing has adapters.
TEST(Optimizer, AveragesOfNoParametersAreSwapped) {
  OptimizerConfig config{.type = "adamw"};
  config.ema = 0.9;
  const auto optimizer = make_optimizer(config, {});
  optimizer->step(1e-3);
  EXPECT_NO_THROW(optimizer->swap_averages());
  EXPECT_NO_THROW(optimizer->swap_averages());
  EXPECT_THROW(make_optimizer({.type = "adamw"}, {})->swap_averages(),
               std::exception);
}

}  // namespace
}  // namespace tessera::optim
