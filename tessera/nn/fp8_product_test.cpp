#include "tessera/nn/fp8_product.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "tessera/nn/matmul.h"

namespace tessera::nn {
namespace {

at::Tensor random(at::IntArrayRef sizes) {
  return at::randn(sizes).to(at::kBFloat16);
}

double relative(const at::Tensor& found, const at::Tensor& wanted) {
  const at::Tensor wide = wanted.to(at::kDouble);
  return ((found.to(at::kDouble) - wide).norm() / wide.norm()).item<double>();
}

// The number of e4m3 that is nearest to x, of two the even one: 3 bits behind
// the first, in steps of 2^-9 and more.
double nearest(double x) {
  const double step =
      std::ldexp(1.0, std::max(std::ilogb(std::abs(x) + 1e-300), -6) - 3);
  return std::nearbyint(x / step) * step;
}

// x as it is multiplied: rounded by rows, in fp64.
at::Tensor rounded(const at::Tensor& x) {
  at::Tensor wide = x.to(at::kDouble).contiguous();
  for (int64_t r = 0; r < wide.size(0); ++r) {
    const double most = wide[r].abs().max().item<double>();
    const auto inverse = static_cast<double>(448.0F / static_cast<float>(most));
    double* const row = wide[r].mutable_data_ptr<double>();
    for (int64_t k = 0; k < wide.size(1); ++k) {
      row[k] = nearest(static_cast<float>(row[k] * inverse)) * most / 448;
    }
  }
  return wide;
}

// Of weights that are much larger in some rows, and in some columns.
struct Layer {
  at::Tensor x = random({40, 48}), dy = random({40, 64});
  at::Tensor weight = (at::randn({64, 48}) * at::logspace(-2, 3, 48) *
                       at::logspace(-3, 1, 64).unsqueeze(1))
                          .to(at::kBFloat16);
};

TEST(Fp8Rows, AreTheNearestNumbersOfE4m3) {
  for (const at::Tensor& x : {Layer().weight, random({3, 16}) * 1e-30}) {
    const Fp8Rows rows = fp8_rows(x);
    EXPECT_EQ(rows.values.scalar_type(), at::kFloat8_e4m3fn);
    EXPECT_EQ(rows.scales.sizes(), at::IntArrayRef({x.size(0), 1}));
    const at::Tensor found =
        rows.values.to(at::kDouble) * rows.scales.to(at::kDouble);
    EXPECT_LT(relative(found, rounded(x)), 1e-6);
    EXPECT_EQ(rows.values.to(at::kFloat).abs().amax(1).min().item<float>(),
              448);
    const Fp8Rows columns = fp8_columns(x);
    const Fp8Rows wanted = fp8_rows(x.t());
    EXPECT_TRUE(
        columns.values.view(at::kByte).equal(wanted.values.view(at::kByte)));
    EXPECT_TRUE(columns.scales.equal(wanted.scales));
  }
}

TEST(Fp8Rows, OfZerosAndOfWhatIsNoNumber) {
  at::Tensor x = random({4, 16});
  x[0].zero_();
  x[1][3] = std::numeric_limits<float>::infinity();
  x[2][5] = NAN;
  const at::Tensor y = at::empty({4, 16}, x.options());
  fp8_product_into(y, fp8_rows(x), fp8_rows(random({16, 16})), {},
                   Sums::kExact);
  EXPECT_TRUE(y[0].eq(0).all().item<bool>());
  EXPECT_FALSE(y[1].isfinite().any().item<bool>());
  EXPECT_FALSE(y[2].isfinite().any().item<bool>());
  EXPECT_TRUE(y[3].isfinite().all().item<bool>());
}

// y and dx are products of the rounded operands, rounded once; and the weight's
// gradient is that without fp8, also where it is added.
TEST(Fp8Product, IsThatOfTheRoundedOperands) {
  const Layer of;
  const at::Tensor bias = random({64});
  const auto run = [&](ProductType type) {
    const at::Tensor x = of.x.detach().requires_grad_();
    const at::Tensor weight = of.weight.detach().requires_grad_();
    weight.mutable_grad() = at::ones({64, 48});
    const at::Tensor y = linear_product(x, weight, bias, type);
    y.backward(of.dy);
    return std::array{y.detach(), x.grad(), weight.grad()};
  };
  const auto plain = run(ProductType::kSame), found = run(ProductType::kFp8);
  const at::Tensor y = rounded(of.x).mm(rounded(of.weight).t()) + bias;
  const at::Tensor dx = rounded(of.dy).mm(rounded(of.weight.t()).t());
  const double once = 3e-3;  // bf16's rounding
  EXPECT_LT(relative(found[0], y), once);
  EXPECT_LT(relative(found[1], dx), once);
  EXPECT_GT(relative(found[0], plain[0]), 1e-2);
  EXPECT_GT(relative(found[1], plain[1]), 1e-2);
  EXPECT_LT(relative(found[0], plain[0]), 1e-1);
  EXPECT_LT(relative(found[1], plain[1]), 1e-1);
  EXPECT_TRUE(found[2].equal(plain[2]));
}

// The parts of dx are rounded before they are summed, as several products are.
TEST(Fp8Product, SeveralOfOneInput) {
  const Layer of, other;
  const auto run = [&](bool at_once) {
    const at::Tensor x = of.x.detach().requires_grad_();
    std::vector<at::Tensor> outputs;
    if (at_once) {
      outputs =
          linear_products(x, {of.weight, other.weight}, {}, ProductType::kFp8);
    } else {
      for (const Layer* each : {&of, &other}) {
        outputs.push_back(
            linear_product(x, each->weight, {}, ProductType::kFp8));
      }
    }
    torch::autograd::backward(outputs, {of.dy, other.dy});
    return std::array{outputs[0].detach(), outputs[1].detach(), x.grad()};
  };
  const auto found = run(true), wanted = run(false);
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(found[i].equal(wanted[i])) << i;
  }
}

TEST(Fp8Product, OfSizesThatTakeNoneIsThatWithout) {
  for (const auto& [in, out] : {std::pair{40, 64}, {48, 60}}) {
    const at::Tensor x = random({7, in}), weight = random({out, in});
    EXPECT_FALSE(takes_fp8(weight));
    EXPECT_TRUE(linear_product(x, weight, {}, ProductType::kFp8)
                    .equal(linear_product(x, weight)));
  }
  EXPECT_FALSE(takes_fp8(at::ones({16, 16})));
  EXPECT_FALSE(takes_fp8(random({16, 0})));  // a shard without features
}

// Its second derivative is that of the weights as they are.
TEST(Fp8Product, ARecordedBackwardIsFollowed) {
  const Layer of;
  const at::Tensor x = of.x.detach().requires_grad_();
  const at::Tensor weight = of.weight.detach().requires_grad_();
  const at::Tensor dy = of.dy.detach().requires_grad_();
  const at::Tensor dx = torch::autograd::grad(
      {linear_product(x, weight, {}, ProductType::kFp8)}, {x}, {dy},
      /*retain_graph=*/true, /*create_graph=*/true)[0];
  EXPECT_TRUE(dx.equal(of.dy.mm(of.weight)));
  EXPECT_TRUE(torch::autograd::grad({dx.sum()}, {dy})[0].defined());
}

}  // namespace
}  // namespace tessera::nn
