#include "tessera/wrappers/fused_adam.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <vector>

namespace tessera {
namespace {

namespace to = torch::optim;

// Shapes that vectors do not divide, an empty one and a scalar.
std::vector<at::Tensor> parameters_of(at::ScalarType type) {
  torch::manual_seed(0);
  std::vector<at::Tensor> all;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{37, 19}, {0, 5}, {}, {1031}, {3, 4, 5}}) {
    all.push_back(torch::randn(shape, type).requires_grad_());
  }
  return all;
}

// Of parameter `i` in a step; the last has none in every other.
void give_gradients(const std::vector<at::Tensor>& parameters, int64_t step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor each = parameters[i];
    const bool left_out = i + 1 == parameters.size() && step % 2 == 1;
    each.mutable_grad() =
        left_out ? at::Tensor()
                 : torch::sin(each.detach() * static_cast<double>(step + 1));
  }
}

template <typename Optimizer, typename Options>
std::unique_ptr<to::Optimizer> make(const std::vector<at::Tensor>& parameters,
                                    const Options& options) {
  const std::vector<at::Tensor> first = {parameters.begin(),
                                         parameters.begin() + 2};
  const std::vector<at::Tensor> others = {parameters.begin() + 2,
                                          parameters.end()};
  auto own = std::make_unique<Options>(options);
  own->lr(3e-3).weight_decay(0).betas({0.8, 0.9});
  return std::make_unique<Optimizer>(
      std::vector<to::OptimizerParamGroup>{
          to::OptimizerParamGroup(first),
          to::OptimizerParamGroup(others, std::move(own))},
      options);
}

void expect_equal(const std::vector<at::Tensor>& a,
                  const std::vector<at::Tensor>& b, double most) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].numel() == 0) continue;
    EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), most) << i;
  }
}

template <typename Ours, typename Theirs, typename Options>
void expect_steps_of(const Options& options, at::ScalarType type, double most) {
  const auto mine = parameters_of(type), wanted = parameters_of(type);
  auto ours = make<Ours>(mine, options);
  const auto theirs = make<Theirs>(wanted, options);
  for (int64_t step = 0; step < 10; ++step) {
    give_gradients(mine, step);
    give_gradients(wanted, step);
    ours->step();
    theirs->step();
    if (step != 4) continue;
    // LibTorch's own goes on from what was kept, and hands it back.
    std::stringstream file, back;
    torch::save(*ours, file);
    const auto between = make<Theirs>(mine, options);
    torch::load(*between, file);
    torch::save(*between, back);
    ours = make<Ours>(mine, options);
    torch::load(*ours, back);
  }
  expect_equal(mine, wanted, most);
}

TEST(FusedAdam, StepsAsLibTorchDoes) {
  for (const bool amsgrad : {false, true}) {
    const auto adam = to::AdamOptions(1e-2).weight_decay(0.1).amsgrad(amsgrad);
    const auto adamw =
        to::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(amsgrad);
    expect_steps_of<FusedAdam, to::Adam>(adam, at::kDouble, 1e-13);
    expect_steps_of<FusedAdamW, to::AdamW>(adamw, at::kDouble, 1e-13);
    expect_steps_of<FusedAdam, to::Adam>(adam, at::kFloat, 1e-5);
    expect_steps_of<FusedAdamW, to::AdamW>(adamw, at::kFloat, 1e-5);
  }
}

// bf16 is LibTorch's, and so is a parameter that does not lie in one piece.
TEST(FusedAdam, LeavesWhatItDoesNotServeToLibTorch) {
  const auto options = to::AdamWOptions(1e-2);
  expect_steps_of<FusedAdamW, to::AdamW>(options, at::kBFloat16, 0);
  const auto ends = [&](auto make_optimizer) {
    at::Tensor all = at::arange(12, at::kDouble).view({3, 4});
    const at::Tensor columns = all.narrow(1, 1, 2).requires_grad_();
    columns.mutable_grad() = at::ones_like(columns);
    make_optimizer(columns)->step();
    return all;
  };
  EXPECT_TRUE(at::equal(ends([&](const at::Tensor& of) {
                          return std::make_unique<FusedAdamW>(
                              std::vector<at::Tensor>{of}, options);
                        }),
                        ends([&](const at::Tensor& of) {
                          return std::make_unique<to::AdamW>(
                              std::vector<at::Tensor>{of}, options);
                        })));
}

TEST(FusedAdam, RunsAClosure) {
  const at::Tensor x = at::ones({3}).requires_grad_();
  FusedAdam optimizer({x}, to::AdamOptions(0.1));
  const at::Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    at::Tensor sum = x.sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_NEAR(x[0].item<float>(), 0.9, 1e-6);
}

}  // namespace
}  // namespace tessera
