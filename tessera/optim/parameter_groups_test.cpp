#include "tessera/optim/parameter_groups.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "tessera/core/error.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> names() {
  return {"embed.tokens.weight", "blocks.0.attention.q.weight",
          "blocks.0.attention.q.bias", "blocks.1.attention.q.weight",
          "head.weight"};
}

std::string refusal(const std::vector<ParameterGroup>& groups,
                    double lr = 0.1) {
  try {
    check_groups({.lr = lr, .groups = groups}, names());
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return message_of(error);
  }
  return "";
}

TEST(ParameterGroups, WhatMatchesNothingIsRefused) {
  EXPECT_EQ(refusal({{.match = {"*.bias", "embed.*"}}, {.match = {"*"}}}), "");
  EXPECT_THAT(
      refusal({{.match = {"*"}}, {.match = {"blocks.*.attn.q.weight"}}}),
      HasSubstr("optimizer.groups[1].match is \"blocks.*.attn.q.weight\", "
                "which matches no parameter that is trained. Nearest: "
                "blocks.*.attention.q.weight"));
  EXPECT_THAT(refusal({{.match = {"*.weight"}}, {.match = {"head.*"}}}),
              HasSubstr("optimizer.groups[1] gets no parameter"));
  EXPECT_THAT(refusal({{.match = {"*"}, .lr = 0.5}}, /*lr=*/0),
              HasSubstr("optimizer.groups[0].lr is 0.5, which the schedule "
                        "scales as optimizer.lr, but that is 0"));
}

TEST(ParameterGroups, TheFirstThatMatchesCounts) {
  const OptimizerConfig config{
      .lr = 0.1,
      .weight_decay = 0.5,
      .groups = {
          {.match = {"*.q.*"}, .lr = 0.2, .betas = {0.5, 0.6}},
          {.match = {"blocks.*"}, .lr = 0.3},
          {.match = {"*.bias", "head.weight"}, .lr = 0, .weight_decay = 0.25}}};
  const auto way = [&](const char* name, bool decays) {
    return way_of(config, update_rule("adamw"), name, decays, false);
  };
  EXPECT_EQ(way("blocks.0.attention.q.weight", true).lr_factor, 2);
  EXPECT_EQ(way("blocks.0.attention.q.weight", true).weight_decay, 0.5);
  EXPECT_EQ(way("blocks.0.attention.q.bias", false).weight_decay, 0);
  EXPECT_EQ(way("blocks.0.attention.q.bias", false).betas,
            (std::vector<double>{0.5, 0.6}));
  EXPECT_EQ(way("head.weight", true).lr_factor, 0);
  EXPECT_EQ(way("norm.bias", false).weight_decay, 0.25);
  EXPECT_EQ(way("embed.tokens.weight", true).lr_factor, 1);
  EXPECT_EQ(way("embed.tokens.weight", true).betas,
            (std::vector<double>{0.9, 0.95}));
}

// Fifty steps beside torch::optim with parameter groups of the same numbers.
TEST(ParameterGroups, EqualTorchs) {
  at::manual_seed(1);
  std::vector<at::Tensor> ours, theirs;
  for (int i = 0; i < 3; ++i) ours.push_back(at::randn({5, 7}, at::kDouble));
  for (const auto& each : ours) {
    theirs.push_back(each.clone().requires_grad_());
  }
  const std::vector<std::string> names = {"a.weight", "b.weight", "b.bias"};
  std::vector<FlatSegment> segments;
  for (size_t i = 0; i < ours.size(); ++i) {
    segments.push_back({names[i], ours[i], at::zeros_like(ours[i]), true});
  }
  const auto optimizer = make_optimizer(
      {.lr = 0.01,
       .betas = {0.9, 0.99},
       .weight_decay = 0.1,
       .groups = {{.match = {"*.bias"}, .lr = 0.03, .weight_decay = 0},
                  {.match = {"b.*"}, .betas = {0.5, 0.7}}}},
      segments);
  using torch::optim::AdamWOptions;
  const auto group = [&](size_t i, double lr, double decay, double beta1,
                         double beta2) {
    auto options = std::make_unique<AdamWOptions>(lr);
    options->weight_decay(decay).betas({beta1, beta2}).eps(1e-8);
    return torch::optim::OptimizerParamGroup({theirs[i]}, std::move(options));
  };
  torch::optim::AdamW reference(std::vector<torch::optim::OptimizerParamGroup>{
      group(0, 0.01, 0.1, 0.9, 0.99), group(1, 0.01, 0.1, 0.5, 0.7),
      group(2, 0.03, 0, 0.9, 0.99)});
  for (int step = 0; step < 50; ++step) {
    for (size_t i = 0; i < ours.size(); ++i) {
      segments[i].gradient.copy_(at::randn({5, 7}, at::kDouble));
      theirs[i].mutable_grad() = segments[i].gradient.clone();
    }
    reference.step();
    optimizer->step(0.01);
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_LT((ours[i] - theirs[i].detach()).norm().item<double>(), 1e-13);
  }
}

}  // namespace
}  // namespace tessera::optim
