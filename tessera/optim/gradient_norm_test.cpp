#include "tessera/optim/gradient_norm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tessera/optim/detail/kernel_table.h"

namespace tessera::optim {
namespace {

double sum_here(const std::vector<at::Tensor>& gradients) {
  return sum_of_squares(gradients).item<double>();
}

TEST(SumOfSquares, EqualsTheSumInDouble) {
  at::manual_seed(3);
  for (const at::ScalarType type :
       {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor a = at::randn({37, 11}).to(type);
    const at::Tensor b = at::randn({7, 5}).to(type).t();
    const double expected = a.to(at::kDouble).square().sum().item<double>() +
                            b.to(at::kDouble).square().sum().item<double>();
    EXPECT_NEAR(sum_here({a, at::empty({0}, type), b}), expected,
                1e-13 * expected);
  }
  EXPECT_EQ(sum_here({}), 0.0);
}

TEST(SumOfSquares, HasTheSameBitsWithAnyVectorsAndThreads) {
  at::manual_seed(3);
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor x = at::randn({100'003}).to(type);
    const auto of = detail::type_of(x);
    const double first =
        kernels::kBaseline.squares(of, x.const_data_ptr(), x.numel());
    for (const auto* by : that_run_here(kernels::kByVectors)) {
      EXPECT_EQ(by->squares(of, x.const_data_ptr(), x.numel()), first)
          << by->name;
    }
    const int threads = at::get_num_threads();
    at::set_num_threads(1);
    const double alone = sum_here({x, x});
    at::set_num_threads(3);
    EXPECT_EQ(sum_here({x, x}), alone);
    at::set_num_threads(threads);
  }
}

TEST(SumOfSquares, StaysOnTheDevice) {
  const at::Tensor sum = sum_of_squares({at::ones({3}, at::kMeta)});
  EXPECT_TRUE(sum.is_meta());
  EXPECT_EQ(sum.scalar_type(), at::kDouble);
}

// In fp32 ten million ones would stop at 2^24.
TEST(SumOfSquares, LosesNothingOverManyElements) {
  EXPECT_EQ(sum_here({at::ones({20'000'003})}), 20'000'003.0);
}

TEST(ClipScale, IsBelowOneOnlyAboveTheLimit) {
  EXPECT_EQ(clip_scale(5.0, 0.0), 1.0);
  EXPECT_EQ(clip_scale(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_scale(1.0, 1.0), 1.0 / (1.0 + 1e-6));
  EXPECT_EQ(clip_scale(4.0, 1.0), 1.0 / (4.0 + 1e-6));
  EXPECT_EQ(clip_scale(0.0, 1.0), 1.0);
  EXPECT_EQ(clip_scale(std::numeric_limits<double>::infinity(), 1.0), 0.0);
  EXPECT_EQ(clip_scale(std::numeric_limits<double>::quiet_NaN(), 1.0), 1.0);
}

TEST(ClipScale, ThereIsTheHostsUnlessTheNormIsNone) {
  const auto there = [](double squares, double clip) {
    return clip_scale_there(at::tensor({squares}, at::kDouble),
                            /*factor=*/0.5, clip)
        .item<double>();
  };
  for (const double clip : {0.0, 1.0, 3.0}) {
    for (const double norm : {0.0, 0.5, 1.0, 4.0}) {
      EXPECT_DOUBLE_EQ(there(4 * norm * norm, clip), clip_scale(norm, clip));
    }
    EXPECT_TRUE(std::isnan(there(std::nan(""), clip)));
    EXPECT_TRUE(std::isnan(there(INFINITY, clip)));
  }
}

TEST(NormalizeScale, BringsEveryNormToOneAndClipsThat) {
  for (const double norm : {1e-3, 1.0, 4.0, 1e5}) {
    EXPECT_EQ(normalize_scale(norm, 0.0), 1.0 / (norm + 1e-6));
    EXPECT_EQ(normalize_scale(norm, 1.0), 1.0 / (norm + 1e-6));
    EXPECT_EQ(normalize_scale(norm, 7.0), 1.0 / (norm + 1e-6));
    EXPECT_NEAR(norm * normalize_scale(norm, 0.25), 0.25, 2e-6);
  }
  // What is next to nothing is not blown up without bound.
  EXPECT_EQ(normalize_scale(0.0, 0.0), 1e6);
}

TEST(GradientScaling, IsNormalisationClippingOrNothing) {
  EXPECT_EQ(GradientScaling{}.of(4.0), 1.0);
  EXPECT_EQ(GradientScaling{.clip_norm = 2.0}.of(4.0), clip_scale(4.0, 2.0));
  const GradientScaling both{.clip_norm = 0.5, .normalizes = true};
  EXPECT_EQ(both.of(4.0), normalize_scale(4.0, 0.5));
}

TEST(ScaleGradients, BringsTheNormToTheLimit) {
  const std::vector<at::Tensor> gradients = {at::full({3}, 4.0),
                                             at::full({2, 2}, -2.0)};
  const double norm = std::sqrt(sum_here(gradients));  // 8
  scale_gradients(gradients, clip_scale(norm, 2.0));
  EXPECT_NEAR(std::sqrt(sum_here(gradients)), 2.0, 1e-6);
  scale_gradients(gradients, 1.0);
  scale_gradients({}, 0.5);
  EXPECT_NEAR(std::sqrt(sum_here(gradients)), 2.0, 1e-6);
}

}  // namespace
}  // namespace tessera::optim
