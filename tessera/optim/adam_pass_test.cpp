// Adam's one pass: each set of vectors that this processor has beside fp64, and
// the whole update beside LibTorch's passes.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "tessera/core/vectors.h"
#include "tessera/optim/kernels/kernels.h"
#include "tessera/optim/optimizer.h"
#include "tests/support/cuda_on_host.h"

namespace tessera::testing::cuda {
#define TESSERA_GPU_THREADS 64
#include "tessera/nn/gpu/loops.cu"
}  // namespace tessera::testing::cuda

namespace tessera::optim {
namespace {

namespace cuda = testing::cuda;

using kernels::AdamNumbers;
using kernels::Copy;
using kernels::Gradient;
using kernels::Kernels;

constexpr int64_t kCount = 1003;  // leaves a tail behind any vectors
constexpr AdamNumbers kNumbers = {.gradient_scale = 0.37,
                                  .decay_in_gradient = 0.02,
                                  .kept = 0.997,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .of_gradient = 0.1,
                                  .of_square = 0.05,
                                  .step_size = 0.003,
                                  .root_scale = 1.7,
                                  .eps = 1e-8};

struct Case {
  const char* name;
  Gradient gradient;
  at::ScalarType type, wide;
  Copy copy = Copy::kNone;
  at::ScalarType copy_type() const {
    return copy == Copy::kF16 ? at::kHalf : at::kBFloat16;
  }
};

constexpr Case kCases[] = {
    {"fp64", Gradient::kF64, at::kDouble, at::kDouble},
    {"fp32", Gradient::kF32, at::kFloat, at::kFloat},
    {"bf16", Gradient::kBF16, at::kBFloat16, at::kFloat},
    {"fp32, rounded", Gradient::kF32, at::kFloat, at::kFloat, Copy::kBF16},
    {"bf16, rounded", Gradient::kBF16, at::kBFloat16, at::kFloat, Copy::kBF16},
    {"fp16", Gradient::kF16, at::kHalf, at::kFloat},
    {"fp32 to fp16", Gradient::kF32, at::kFloat, at::kFloat, Copy::kF16},
    {"fp16 to fp16", Gradient::kF16, at::kHalf, at::kFloat, Copy::kF16},
};

struct Tensors {
  at::Tensor parameter, gradient, exp_avg, exp_avg_sq, rounded;
  Copy copy;

  explicit Tensors(const Case& of) : copy(of.copy) {
    at::manual_seed(5);
    parameter = at::randn({kCount}, at::kDouble).to(of.wide);
    gradient = (at::randn({kCount}, at::kDouble) * 0.1).to(of.type);
    exp_avg = (at::randn({kCount}, at::kDouble) * 0.1).to(of.wide);
    exp_avg_sq = (at::rand({kCount}, at::kDouble) * 0.01).to(of.wide);
    if (copy != Copy::kNone) rounded = at::zeros({kCount}, of.copy_type());
  }

  void update(const Kernels& by, Gradient type, int64_t first, int64_t count) {
    const auto from = [first](const at::Tensor& tensor) -> void* {
      if (!tensor.defined()) return nullptr;
      return static_cast<char*>(tensor.data_ptr()) +
             first * static_cast<int64_t>(tensor.itemsize());
    };
    by.adam(type, kNumbers,
            {from(parameter), from(gradient), from(exp_avg), from(exp_avg_sq),
             from(rounded), copy},
            count);
  }

  void expect_same_bits(const Tensors& other, const std::string& where) const {
    EXPECT_TRUE(at::equal(parameter, other.parameter)) << where;
    EXPECT_TRUE(at::equal(exp_avg, other.exp_avg)) << where;
    EXPECT_TRUE(at::equal(exp_avg_sq, other.exp_avg_sq)) << where;
    if (!rounded.defined()) return;
    EXPECT_TRUE(at::equal(rounded, other.rounded)) << where;
  }
};

double unit_of(at::ScalarType type) {
  return type == at::kDouble ? 0x1p-52 : 0x1p-23;
}

// In units of the last place of the largest term that a number is a sum of.
void expect_close(const at::Tensor& found, double exact, double term, int64_t i,
                  const std::string& where) {
  const double unit = unit_of(found.scalar_type());
  EXPECT_LE(std::abs(found[i].item<double>() - exact),
            3 * unit * std::abs(term))
      << where << " at " << i;
}

// One element at a time, in fp64.
void expect_updated(const Tensors& before, const Tensors& after,
                    const std::string& where) {
  const AdamNumbers& of = kNumbers;
  for (int64_t i = 0; i < kCount; ++i) {
    const auto at = [i](const at::Tensor& tensor) {
      return tensor[i].item<double>();
    };
    const double p = at(before.parameter);
    const double scaled = of.gradient_scale * at(before.gradient);
    const double g = scaled + of.decay_in_gradient * p;
    const double g_term = std::abs(scaled) + std::abs(of.decay_in_gradient * p);
    const double m = of.beta1 * at(before.exp_avg) + of.of_gradient * g;
    const double m_term =
        std::abs(of.beta1 * at(before.exp_avg)) + of.of_gradient * g_term;
    const double v = of.beta2 * at(before.exp_avg_sq) + of.of_square * g * g;
    const double v_term =
        of.beta2 * at(before.exp_avg_sq) + of.of_square * g_term * g_term;
    const double divisor = std::sqrt(v) * of.root_scale + of.eps;
    const double updated = p * of.kept - of.step_size * m / divisor;
    const double step_term = of.step_size * m_term / divisor * (v_term / v);
    expect_close(after.exp_avg, m, m_term, i, where);
    expect_close(after.exp_avg_sq, v, v_term, i, where);
    expect_close(after.parameter, updated, std::abs(p) + step_term, i, where);
  }
}

TEST(AdamKernels, AreWithinUlpsOfFp64) {
  for (const Kernels* by : that_run_here(kernels::kByVectors)) {
    for (const Case& of : kCases) {
      const std::string where = std::string(by->name) + ", " + of.name;
      Tensors after(of);
      after.update(*by, of.gradient, 0, kCount);
      expect_updated(Tensors(of), after, where);
      if (of.copy == Copy::kNone) continue;
      EXPECT_TRUE(at::equal(after.rounded, after.parameter.to(of.copy_type())))
          << where;
    }
  }
}

TEST(AdamKernels, AnElementsBitsDependOnNeitherVectorsNorItsPlace) {
  for (const Case& of : kCases) {
    Tensors whole(of);
    whole.update(kernels::kBaseline, of.gradient, 0, kCount);
    for (const Kernels* by : that_run_here(kernels::kByVectors)) {
      Tensors parts(of);
      int64_t first = 0;
      for (const int64_t count : {1, 3, 64, 7, 33, 895}) {
        parts.update(*by, of.gradient, first, count);
        first += count;
      }
      ASSERT_EQ(first, kCount);
      parts.expect_same_bits(whole, std::string(by->name) + ", " + of.name);
    }
  }
}

template <typename Type>
Type* data_of(const at::Tensor& tensor) {
  return static_cast<Type*>(tensor.defined() ? tensor.data_ptr() : nullptr);
}

// By threads of this host. `there`: a factor of gradients beside their scale;
// `pace`: in place of some of the numbers.
template <typename T>
void update_as_a_gpu(Tensors& of, const double* there = nullptr,
                     const double* pace = nullptr,
                     const kernels::AdamNumbers& by = kNumbers) {
  using W = cuda::Wide<T>;
  const auto numbers = std::bit_cast<cuda::AdamNumbers>(by);
  cuda::launch({2, 1}, cuda::kThreads, [&] {
    cuda::adam(data_of<W>(of.parameter), data_of<const T>(of.gradient),
               data_of<W>(of.exp_avg), data_of<W>(of.exp_avg_sq),
               data_of<cuda::Bf16>(of.rounded), kCount, numbers, there, pace);
  });
}

TEST(AdamKernels, TheLoopForGpusIsWithinUlpsOfFp64) {
  for (const Case& of : kCases) {
    if (of.gradient == Gradient::kF16 || of.copy == Copy::kF16) continue;
    Tensors after(of);
    if (of.gradient == Gradient::kF64) update_as_a_gpu<double>(after);
    if (of.gradient == Gradient::kF32) update_as_a_gpu<float>(after);
    if (of.gradient == Gradient::kBF16) update_as_a_gpu<cuda::Bf16>(after);
    expect_updated(Tensors(of), after, of.name);
    if (of.copy == Copy::kNone) continue;
    EXPECT_TRUE(at::equal(after.rounded, after.parameter.to(of.copy_type())))
        << of.name;
  }
}

TEST(AdamKernels, TheLoopForGpusHeedsAFactorThatLiesThere) {
  const double half = 0.5, none = std::nan("");
  Tensors scaled(kCases[3]), by_half(kCases[3]), before(kCases[3]);
  scaled.gradient.mul_(half);
  update_as_a_gpu<float>(scaled);
  update_as_a_gpu<float>(by_half, &half);
  EXPECT_TRUE(at::allclose(by_half.parameter, scaled.parameter, 1e-6, 0));
  EXPECT_TRUE(at::allclose(by_half.exp_avg, scaled.exp_avg, 1e-6, 0));
  Tensors kept(kCases[3]);
  update_as_a_gpu<float>(kept, &none);
  kept.expect_same_bits(before, "none");
}

TEST(AdamKernels, TheLoopForGpusHeedsAPaceThatLiesThere) {
  const double pace[] = {kNumbers.kept, kNumbers.step_size,
                         kNumbers.root_scale};
  kernels::AdamNumbers of_another_step = kNumbers;
  of_another_step.kept = of_another_step.step_size =
      of_another_step.root_scale = 7;
  Tensors expected(kCases[3]), found(kCases[3]);
  update_as_a_gpu<float>(expected);
  update_as_a_gpu<float>(found, nullptr, pace, of_another_step);
  found.expect_same_bits(expected, "pace");
}

TEST(AdamKernels, ANumberThatIsNoneStaysNone) {
  for (const Kernels* by : that_run_here(kernels::kByVectors)) {
    Tensors tensors(kCases[3]);
    tensors.gradient[500] = std::nan("");
    tensors.update(*by, Gradient::kF32, 0, kCount);
    EXPECT_TRUE(std::isnan(tensors.rounded[500].item<float>())) << by->name;
    EXPECT_EQ(at::isnan(tensors.rounded).sum().item<int64_t>(), 1);
  }
}

struct Trial {
  std::vector<at::Tensor> parameters, gradients;
  std::unique_ptr<Optimizer> optimizer;
};

constexpr double kScale = 0.37;

constexpr double kLr = 1e-2;

OptimizerConfig config() {
  return {.lr = kLr, .betas = {0.9, 0.95}, .weight_decay = 0.1};
}

// With sizes of which threads share some, and the small ones come in between.
Trial run_of(at::ScalarType parameter, at::ScalarType gradient) {
  at::manual_seed(7);
  Trial run;
  std::vector<FlatSegment> segments;
  for (const int64_t rows : {1, 300, 1, 0, 77}) {
    run.parameters.push_back(at::randn({rows, 129}).to(parameter));
    run.gradients.push_back(at::zeros({rows, 129}).to(gradient));
    segments.push_back({"p" + std::to_string(segments.size()),
                        run.parameters.back(), run.gradients.back(),
                        /*decay=*/rows > 1});
  }
  run.optimizer = make_optimizer(config(), std::move(segments));
  return run;
}

void set_gradients(const Trial& run, int step) {
  at::manual_seed(100 + step);
  for (const at::Tensor& gradient : run.gradients) {
    gradient.copy_(at::randn(gradient.sizes()));
  }
}

void take_steps(Trial& run, int count) {
  for (int step = 0; step < count; ++step) {
    set_gradients(run, step);
    run.optimizer->begin_step(kScale);
    run.optimizer->step(kLr, 0, run.parameters.size());
  }
}

TEST(AdamPass, SameBitsForAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    at::set_num_threads(1);
    Trial one = run_of(type, at::kFloat);
    take_steps(one, 3);
    for (const int threads : {2, 3}) {
      at::set_num_threads(threads);
      Trial several = run_of(type, at::kFloat);
      take_steps(several, 3);
      for (size_t i = 0; i < one.parameters.size(); ++i) {
        EXPECT_TRUE(at::equal(one.parameters[i], several.parameters[i]));
      }
    }
  }
  at::set_num_threads(before);
}

// Scaling, LibTorch's fused AdamW and the copy, a pass each.
void expect_equals_libtorchs(at::ScalarType parameter,
                             at::ScalarType gradient) {
  Trial ours = run_of(parameter, gradient);
  const at::ScalarType wide =
      parameter == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<at::Tensor> masters, averages, squares;
  for (const at::Tensor& each : ours.parameters) {
    masters.push_back(each.to(wide, false, /*copy=*/true));
    averages.push_back(at::zeros_like(masters.back()));
    squares.push_back(at::zeros_like(masters.back()));
  }
  constexpr int kSteps = 20;
  for (int step = 0; step < kSteps; ++step) {
    set_gradients(ours, step);
    for (size_t i = 0; i < masters.size(); ++i) {
      const double decay = ours.optimizer->segments()[i].decay ? 0.1 : 0.0;
      at::_fused_adamw_({masters[i]}, {ours.gradients[i].to(wide) * kScale},
                        {averages[i]}, {squares[i]}, {},
                        {at::full({}, step + 1.0)}, kLr, 0.9, 0.95, decay,
                        config().eps, false, false);
    }
    ours.optimizer->begin_step(kScale);
    ours.optimizer->step(kLr, 0, masters.size());
  }
  for (size_t i = 0; i < masters.size(); ++i) {
    const at::Tensor found = ours.parameters[i].to(at::kDouble);
    const at::Tensor exact = masters[i].to(at::kDouble);
    const double unit = parameter == at::kBFloat16 ? 0x1p-8 : unit_of(wide);
    const at::Tensor bound =
        kSteps * unit_of(wide) * (exact.abs() + kSteps * kLr) +
        unit * exact.abs();
    EXPECT_TRUE(((found - exact).abs() <= bound).all().item<bool>())
        << parameter << " " << gradient << " " << i;
  }
}

TEST(AdamPass, EqualsLibTorchsPasses) {
  expect_equals_libtorchs(at::kDouble, at::kDouble);
  expect_equals_libtorchs(at::kDouble, at::kFloat);
  expect_equals_libtorchs(at::kFloat, at::kFloat);
  expect_equals_libtorchs(at::kFloat, at::kBFloat16);
  expect_equals_libtorchs(at::kFloat, at::kDouble);
  expect_equals_libtorchs(at::kBFloat16, at::kFloat);
  expect_equals_libtorchs(at::kBFloat16, at::kBFloat16);
}

}  // namespace
}  // namespace tessera::optim
