// Each set of vectors that this processor has, beside fp64 and LibTorch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "tessera/nn/detail/kernel_table.h"
#include "tessera/nn/kernels/kernels.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

using kernels::Element;
using kernels::Kernels;

struct Case {
  const Kernels* kernels;
  Element element;
  at::ScalarType type;
  int64_t width;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Kernels* each : detail::tables_that_run_here()) {
    for (const int64_t width : {2, 30, 64, 198}) {
      all.push_back({each, Element::kF64, at::kDouble, width});
      all.push_back({each, Element::kF32, at::kFloat, width});
      all.push_back({each, Element::kBF16, at::kBFloat16, width});
      all.push_back({each, Element::kF16, at::kHalf, width});
    }
  }
  return all;
}

class KernelsOf : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { at::manual_seed(7); }
  static constexpr int64_t kRows = 3;
  at::Tensor random() const {
    return (at::randn({kRows, GetParam().width}) * 3).to(GetParam().type);
  }
  at::ScalarType wide() const {
    return GetParam().type == at::kDouble ? at::kDouble : at::kFloat;
  }
  // Largest difference, in units of the last place of the largest value.
  void expect_close(const at::Tensor& found, const at::Tensor& wanted,
                    double ulps = 4) const {
    const at::ScalarType type = found.scalar_type();
    const double unit = type == at::kDouble  ? 0x1p-52
                        : type == at::kFloat ? 0x1p-23
                        : type == at::kHalf  ? 0x1p-11
                                             : 0x1p-8;
    const at::Tensor exact = wanted.to(at::kDouble);
    const double worst =
        (found.to(at::kDouble) - exact).abs().max().item<double>();
    const double largest = exact.abs().max().item<double>();
    EXPECT_LE(worst, ulps * unit * largest);
  }
  void expect_rms_norm(double offset) const {
    const Case& of = GetParam();
    const at::Tensor x = random(), dy = random(), past = random();
    const at::Tensor weight = random()[0].contiguous();
    at::Tensor y = at::empty_like(x), dx = at::empty_like(x);
    at::Tensor scales = at::empty({kRows}, wide());
    at::Tensor dweight = at::zeros({of.width}, wide());
    of.kernels->rms_norm(of.element, x.data_ptr(), weight.data_ptr(),
                         y.data_ptr(), scales.data_ptr(), kRows, of.width, 1e-5,
                         offset);
    const auto backward = [&](const at::Tensor& weight_gradient,
                              const void* more) {
      of.kernels->rms_norm_backward(of.element, dy.data_ptr(), x.data_ptr(),
                                    weight.data_ptr(), scales.data_ptr(), more,
                                    dx.data_ptr(), weight_gradient.data_ptr(),
                                    kRows, of.width, offset);
    };
    backward(dweight, nullptr);
    const at::Tensor wide_x = x.to(at::kDouble).requires_grad_();
    const at::Tensor wide_weight = weight.to(at::kDouble).requires_grad_();
    const at::Tensor wanted = wide_x *
                              at::rsqrt(wide_x.square().mean(-1, true) + 1e-5) *
                              (wide_weight + offset);
    wanted.backward(dy.to(at::kDouble));
    expect_close(y, wanted.detach());
    expect_close(dx, wide_x.grad(), 16);
    expect_close(dweight, wide_weight.grad(), 16);
    backward(at::zeros_like(dweight), past.data_ptr());
    expect_close(dx, wide_x.grad() + past.to(at::kDouble), 16);
  }
};

TEST_P(KernelsOf, Swiglu) {
  const Case& of = GetParam();
  const at::Tensor gate = random(), up = random(), dy = random();
  at::Tensor y = at::empty_like(gate), dgate = y.clone(), dup = y.clone();
  of.kernels->swiglu(of.element, gate.data_ptr(), up.data_ptr(), y.data_ptr(),
                     y.numel());
  of.kernels->swiglu_backward(of.element, dy.data_ptr(), gate.data_ptr(),
                              up.data_ptr(), dgate.data_ptr(), dup.data_ptr(),
                              y.numel());
  const at::Tensor wide_gate = gate.to(at::kDouble).requires_grad_();
  const at::Tensor wide_up = up.to(at::kDouble).requires_grad_();
  const at::Tensor wanted = at::silu(wide_gate) * wide_up;
  wanted.backward(dy.to(at::kDouble));
  expect_close(y, wanted.detach());
  expect_close(dgate, wide_gate.grad());
  expect_close(dup, wide_up.grad());
}

// Two tokens of two choices; one of these has no row.
TEST_P(KernelsOf, AddUpRows) {
  const Case& of = GetParam();
  const at::Tensor rows = random();
  const at::Tensor dy = random().narrow(0, 0, 2).contiguous();
  const at::Tensor weights = at::rand({2, 2}, wide());
  const at::Tensor row = at::tensor(std::vector<int64_t>{2, 0, kRows, 1});
  at::Tensor y = at::empty_like(dy), drows = at::empty_like(rows);
  at::Tensor dweights = at::empty_like(weights);
  of.kernels->add_up_rows(of.element, rows.data_ptr(),
                          row.const_data_ptr<int64_t>(), weights.data_ptr(),
                          y.data_ptr(), 2, 2, kRows, of.width);
  of.kernels->add_up_rows_backward(of.element, dy.data_ptr(), rows.data_ptr(),
                                   row.const_data_ptr<int64_t>(),
                                   weights.data_ptr(), drows.data_ptr(),
                                   dweights.data_ptr(), 2, 2, kRows, of.width);
  const at::Tensor wide_rows = rows.to(at::kDouble).requires_grad_();
  const at::Tensor wide_weights = weights.to(at::kDouble).requires_grad_();
  const at::Tensor wanted = at::stack(
      {wide_rows[2] * wide_weights[0][0] + wide_rows[0] * wide_weights[0][1],
       wide_rows[1] * wide_weights[1][1]});
  wanted.backward(dy.to(at::kDouble));
  expect_close(y, wanted.detach());
  expect_close(drows, wide_rows.grad());
  expect_close(dweights, wide_weights.grad());
}

// The slope by 1 / cosh^2: LibTorch's 1 - tanh^2 loses places.
struct WideGelu {
  explicit WideGelu(const at::Tensor& x) {
    const double root = std::sqrt(2 / std::numbers::pi);
    const at::Tensor u = root * (x + 0.044715 * x.pow(3));
    const at::Tensor s = at::sigmoid(2 * u);
    value = x * s;
    slope =
        s + x / 2 * root * (1 + 3 * 0.044715 * x.pow(2)) / at::cosh(u).pow(2);
  }
  at::Tensor value, slope;
};

TEST_P(KernelsOf, Geglu) {
  const Case& of = GetParam();
  const at::Tensor gate = random(), up = random(), dy = random();
  at::Tensor y = at::empty_like(gate), dgate = y.clone(), dup = y.clone();
  of.kernels->geglu(of.element, gate.data_ptr(), up.data_ptr(), y.data_ptr(),
                    y.numel());
  of.kernels->geglu_backward(of.element, dy.data_ptr(), gate.data_ptr(),
                             up.data_ptr(), dgate.data_ptr(), dup.data_ptr(),
                             y.numel());
  const WideGelu wanted(gate.to(at::kDouble));
  const at::Tensor wide_up = up.to(at::kDouble), wide_dy = dy.to(at::kDouble);
  expect_close(y, wanted.value * wide_up);
  expect_close(dgate, wide_dy * wide_up * wanted.slope);
  expect_close(dup, wide_dy * wanted.value);
}

TEST_P(KernelsOf, Gelu) {
  const Case& of = GetParam();
  const at::Tensor x = random(), dy = random();
  at::Tensor y = at::empty_like(x), dx = y.clone();
  of.kernels->gelu(of.element, x.data_ptr(), y.data_ptr(), y.numel());
  of.kernels->gelu_backward(of.element, dy.data_ptr(), x.data_ptr(),
                            dx.data_ptr(), y.numel());
  const WideGelu wanted(x.to(at::kDouble));
  expect_close(y, wanted.value);
  expect_close(dx, dy.to(at::kDouble) * wanted.slope);
}

TEST_P(KernelsOf, GeluOfLargeNumbers) {
  const Case& of = GetParam();
  at::Tensor y = at::empty({kRows, of.width}, of.type), dx = y.clone();
  const at::Tensor dy = at::ones_like(y);
  for (const double number : {-1000.0, -10.0, 0.0, 10.0, 1000.0}) {
    const at::Tensor x = at::full_like(y, number);
    of.kernels->gelu(of.element, x.data_ptr(), y.data_ptr(), y.numel());
    of.kernels->gelu_backward(of.element, dy.data_ptr(), x.data_ptr(),
                              dx.data_ptr(), y.numel());
    EXPECT_NEAR(y[0][0].item<double>(), number > 0 ? number : 0, 1e-20);
    EXPECT_NEAR(dx[0][0].item<double>(),
                number > 0    ? 1
                : number == 0 ? 0.5
                              : 0,
                1e-20);
  }
}

// The third row has no target.
TEST_P(KernelsOf, CrossEntropy) {
  const Case& of = GetParam();
  constexpr double kScale = 0.25;
  at::Tensor logits = random();
  const at::Tensor targets = at::randint(of.width, {kRows}, at::kLong);
  targets[2] = -100;
  const at::Tensor wide = logits.to(at::kDouble).requires_grad_();
  const at::Tensor wanted =
      at::cross_entropy_loss(wide, targets, {}, at::Reduction::None);
  (wanted.sum() * kScale).backward();
  at::Tensor losses = at::empty({kRows}, at::kDouble);
  const auto run = [&](const double* scale) {
    of.kernels->cross_entropy(
        of.element, logits.data_ptr(), targets.const_data_ptr<int64_t>(),
        losses.mutable_data_ptr<double>(), kRows, of.width, scale);
  };
  const at::Tensor before = logits.clone();
  run(nullptr);
  EXPECT_TRUE(logits.equal(before));
  // Sums are of the wide type.
  expect_close(losses.to(wide_type(logits)), wanted.detach());
  run(&kScale);
  expect_close(logits, wide.grad());
}

TEST_P(KernelsOf, Add) {
  const Case& of = GetParam();
  const at::Tensor x = random();
  at::Tensor sums = random().to(wide_type(x));
  const at::Tensor wanted = sums + x.to(sums.scalar_type());
  of.kernels->add(of.element, sums.data_ptr(), x.data_ptr(), x.numel());
  EXPECT_TRUE(sums.equal(wanted));
}

// e^-x beyond what fp32 holds.
TEST_P(KernelsOf, SwigluOfLargeGates) {
  const Case& of = GetParam();
  const at::Tensor up = at::ones({kRows, of.width}).to(of.type);
  at::Tensor y = at::empty_like(up);
  for (const double gate : {-1000.0, -90.0, 90.0, 1000.0}) {
    const at::Tensor gates = at::full_like(up, gate);
    of.kernels->swiglu(of.element, gates.data_ptr(), up.data_ptr(),
                       y.data_ptr(), y.numel());
    EXPECT_NEAR(y[0][0].item<double>(), gate > 0 ? gate : 0, 1e-30);
  }
}

TEST_P(KernelsOf, RmsNorm) {
  expect_rms_norm(/*offset=*/0);
  expect_rms_norm(/*offset=*/1);
}

TEST_P(KernelsOf, RotationsTurnBack) {
  const Case& of = GetParam();
  const at::Tensor x = random();
  at::Tensor y = at::empty_like(x), back = at::empty_like(x);
  const at::Tensor angles = at::randn({of.width / 2}).to(wide());
  const at::Tensor cos = angles.cos(), sin = angles.sin();
  const auto turn = [&](const at::Tensor& from, const at::Tensor& to,
                        double direction) {
    of.kernels->rotate(of.element, from.data_ptr(), cos.data_ptr(),
                       sin.data_ptr(), to.data_ptr(), kRows, of.width,
                       direction);
  };
  turn(x, y, 1);
  turn(y, back, -1);
  const auto halves = x.to(at::kDouble).chunk(2, -1);
  const at::Tensor c = cos.to(at::kDouble), s = sin.to(at::kDouble);
  expect_close(
      y, at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s},
                 -1));
  expect_close(back, x, 8);
}

INSTANTIATE_TEST_SUITE_P(Vectors, KernelsOf, ::testing::ValuesIn(cases()),
                         [](const auto& info) {
                           return std::string(info.param.kernels->name) + "_" +
                                  c10::toString(info.param.type) + "_" +
                                  std::to_string(info.param.width);
                         });

}  // namespace
}  // namespace tessera::nn
