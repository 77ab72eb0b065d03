#include "tessera/nn/rotary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "tessera/core/error.h"
#include "tests/support/gradients.h"

namespace tessera::nn {
namespace {

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

}  // namespace
}  // namespace tessera::nn
