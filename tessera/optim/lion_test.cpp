#include "tessera/optim/lion.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

constexpr int kSteps = 50;

double learning_rate(int step) { return 0.01 / (1 + step % 7); }

std::vector<FlatSegment> segments_of(const std::vector<at::Tensor>& tensors) {
  std::vector<FlatSegment> segments;
  for (size_t i = 0; i < tensors.size(); ++i) {
    segments.push_back({"p" + std::to_string(i), tensors[i],
                        at::zeros_like(tensors[i]), tensors[i].dim() >= 2});
  }
  return segments;
}

// Algorithm 2 of the paper, in double precision.
void take_papers_lion_step(at::Tensor& parameter, at::Tensor& momentum,
                           const at::Tensor& gradient, double lr, double beta1,
                           double beta2, double lambda) {
  auto* p = parameter.mutable_data_ptr<double>();
  auto* m = momentum.mutable_data_ptr<double>();
  const auto* g = gradient.const_data_ptr<double>();
  for (int64_t i = 0; i < parameter.numel(); ++i) {
    const double c = beta1 * m[i] + (1 - beta1) * g[i];
    const double sign = c > 0 ? 1 : c < 0 ? -1 : 0;
    p[i] -= lr * (sign + lambda * p[i]);
    m[i] = beta2 * m[i] + (1 - beta2) * g[i];
  }
}

// The largest difference to the paper's, relative to the parameters' norm.
// `betas` empty: those that the paper gives.
double lion_difference(at::ScalarType type, const std::vector<double>& betas,
                       double weight_decay) {
  at::manual_seed(1);
  const std::vector<at::Tensor> parameters = {
      at::randn({17, 5}, at::kDouble).to(type),
      at::randn({13}, at::kDouble).to(type)};
  const auto ours = make_optimizer(
      {.type = "lion", .betas = betas, .weight_decay = weight_decay},
      segments_of(parameters));
  std::vector<at::Tensor> expected, momenta;
  for (const at::Tensor& parameter : parameters) {
    expected.push_back(parameter.to(at::kDouble, /*non_blocking=*/false,
                                    /*copy=*/true));
    momenta.push_back(at::zeros_like(expected.back()));
  }
  at::manual_seed(2);
  for (int step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const FlatSegment& segment = ours->segments()[i];
      segment.gradient.copy_(at::randn_like(segment.gradient));
      segment.gradient.flatten()[step % 13].zero_();
      take_papers_lion_step(
          expected[i], momenta[i], segment.gradient.to(at::kDouble),
          learning_rate(step), betas.empty() ? 0.9 : betas[0],
          betas.empty() ? 0.99 : betas[1], segment.decay ? weight_decay : 0.0);
    }
    ours->step(learning_rate(step));
  }
  double worst = 0.0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor error = parameters[i].to(at::kDouble) - expected[i];
    worst = std::max(worst, (error.norm() / expected[i].norm()).item<double>());
  }
  return worst;
}

TEST(Lion, EqualsThePapersOverFiftySteps) {
  for (const double decay : {0.0, 0.3}) {
    for (const auto& betas :
         {std::vector<double>(), {0.9, 0.95}, {0.0, 0.5}, {0.95, 0.0}}) {
      EXPECT_LT(lion_difference(at::kDouble, betas, decay), 1e-14);
      EXPECT_LT(lion_difference(at::kFloat, betas, decay), 1e-6);
    }
  }
}

// A row of an embedding that no token of the batch has.
TEST(Lion, WhatHasNoGradientStaysWhereItIs) {
  const at::Tensor parameter = at::ones({3});
  const auto lion = make_optimizer({.type = "lion"}, segments_of({parameter}));
  lion->segments()[0].gradient[1] = 1e-30;
  for (int step = 0; step < 3; ++step) lion->step(0.25);
  EXPECT_TRUE(at::equal(parameter, at::tensor({1.0F, 0.25F, 1.0F})));
}

}  // namespace
}  // namespace tessera::optim
