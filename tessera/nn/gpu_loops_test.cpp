// The loops for GPUs on this host's threads, beside those for the CPU; and that
// NVRTC takes them is tests/parity/test_gpu_loops.py's.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/nn/detail/one_pass.h"
#include "tessera/nn/wide_type.h"
#include "tests/support/cuda_on_host.h"

namespace tessera::testing::cuda {
#define TESSERA_GPU_THREADS 64
#include "tessera/nn/gpu/loops.cu"
}  // namespace tessera::testing::cuda

namespace tessera::nn {
namespace {

namespace cuda = testing::cuda;

// Of one type: what it is in loops.cu, and how far orders of sums are apart.
struct F64 {
  using Type = double;
  static constexpr at::ScalarType kType = at::kDouble;
  static constexpr double kBound = 1e-12;
};
struct F32 {
  using Type = float;
  static constexpr at::ScalarType kType = at::kFloat;
  static constexpr double kBound = 1e-5;
};
struct BF16 {
  using Type = cuda::Bf16;
  static constexpr at::ScalarType kType = at::kBFloat16;
  static constexpr double kBound = 1e-2;
};

template <typename Of>
class GpuLoops : public ::testing::Test {
 protected:
  using T = typename Of::Type;
  using W = cuda::Wide<T>;

  static at::Tensor random(at::IntArrayRef sizes) {
    return at::randn(sizes, at::kDouble).to(Of::kType);
  }
  static at::Tensor like(const at::Tensor& x) { return at::empty_like(x); }
  static T* data(const at::Tensor& x) { return static_cast<T*>(x.data_ptr()); }
  static W* wide(const at::Tensor& x) { return static_cast<W*>(x.data_ptr()); }
  static void run(cuda::Place grid, const std::function<void()>& body) {
    cuda::launch(grid, cuda::kThreads, body);
  }
  static void expect_close(const at::Tensor& found,
                           const at::Tensor& expected) {
    EXPECT_TRUE(at::allclose(found, expected, Of::kBound, Of::kBound))
        << (found - expected).abs().max();
  }
};

using Types = ::testing::Types<F64, F32, BF16>;
TYPED_TEST_SUITE(GpuLoops, Types);

TYPED_TEST(GpuLoops, NormsAndTheirGradients) {
  constexpr int64_t kRows = 5, kWidth = 150, kRowsAPart = 3;
  const auto x = this->random({kRows, kWidth}), weight = this->random({kWidth});
  const auto dy = this->random({kRows, kWidth}),
             past = this->random({kRows, kWidth});
  for (const double offset : {0.0, 1.0}) {
    const auto [y, scales] = detail::rms_norm_forward(x, weight, 1e-5, offset);
    const auto found = this->like(y), found_scales = this->like(scales);
    this->run({kRows, 1}, [&] {
      cuda::rms_norm(this->data(x), this->data(weight), this->data(found),
                     this->wide(found_scales), kWidth, 1e-5, offset);
    });
    this->expect_close(found, y);
    this->expect_close(found_scales, scales);
    for (const bool adds : {false, true}) {
      const auto [dx, dweight] = detail::rms_norm_backward(
          dy, x, weight, scales, offset, adds ? past : at::Tensor());
      const auto found_dx = this->like(dx);
      this->run({kRows, 1}, [&] {
        cuda::rms_norm_backward(this->data(dy), this->data(x),
                                this->data(weight), this->wide(scales),
                                adds ? this->data(past) : nullptr,
                                this->data(found_dx), kWidth, offset);
      });
      this->expect_close(found_dx, dx);
      const auto parts = at::empty({2, kWidth}, scales.options());
      this->run({(kWidth + 31) / 32, 2}, [&] {
        cuda::rms_norm_weight(this->data(dy), this->data(x), this->wide(scales),
                              this->wide(parts), kRows, kRowsAPart, kWidth);
      });
      this->expect_close(parts.sum(0).to(dweight.scalar_type()), dweight);
    }
  }
}

TYPED_TEST(GpuLoops, GatesAndTheirGradients) {
  const auto gate = this->random({7, 45}) * 3, up = this->random({7, 45});
  const auto dy = this->random({7, 45});
  for (const auto kind : {detail::Gate::kSilu, detail::Gate::kGelu}) {
    const bool is_silu = kind == detail::Gate::kSilu;
    const auto y = this->like(up), dgate = this->like(up), dup = this->like(up);
    this->run({3, 1}, [&] {
      cuda::glu(is_silu, this->data(gate), this->data(up), this->data(y),
                up.numel());
    });
    this->expect_close(y, detail::glu(kind, gate, up));
    this->run({3, 1}, [&] {
      cuda::glu_backward(is_silu, this->data(dy), this->data(gate),
                         this->data(up), this->data(dgate), this->data(dup),
                         up.numel());
    });
    const auto [expected_dgate, expected_dup] =
        detail::glu_backward(kind, dy, gate, up);
    this->expect_close(dgate, expected_dgate);
    this->expect_close(dup, expected_dup);
  }
}

TYPED_TEST(GpuLoops, RotationsAndBack) {
  constexpr int64_t kTokens = 5, kHeads = 3, kHalf = 4;
  const auto x = this->random({2, kTokens, kHeads, 2 * kHalf});
  const auto angles = at::randn({kTokens, kHalf}, at::kDouble);
  const auto cos = angles.cos().to(wide_type(x));
  const auto sin = angles.sin().to(wide_type(x));
  for (const double direction : {1.0, -1.0}) {
    const auto y = this->like(x);
    this->run({2, 1}, [&] {
      cuda::rotate(this->data(x), this->wide(cos), this->wide(sin),
                   this->data(y), x.numel() / 2, kTokens, kHeads, kHalf,
                   direction);
    });
    this->expect_close(
        y, detail::rotate(x, cos, sin, direction, /*in_place=*/false));
  }
}

TYPED_TEST(GpuLoops, LossesAndTheirGradients) {
  constexpr int64_t kRows = 4, kWidth = 131, kIgnored = -100;
  const auto logits = this->random({kRows, kWidth}) * 4;
  const auto targets =
      at::tensor({int64_t{7}, kIgnored, int64_t{130}, int64_t{0}});
  for (const bool scaled : {false, true}) {
    const auto expected = logits.clone(), found = logits.clone();
    const double sum =
        detail::cross_entropy(expected, targets, kIgnored,
                              scaled ? std::optional(0.25) : std::nullopt)
            .template item<double>();
    const auto losses = at::empty({kRows}, at::kDouble);
    this->run({kRows, 1}, [&] {
      cuda::cross_entropy(
          this->data(found),
          reinterpret_cast<const long long*>(targets.const_data_ptr<int64_t>()),
          kIgnored, losses.template mutable_data_ptr<double>(), kWidth, scaled,
          0.25);
    });
    EXPECT_NEAR(losses.sum().template item<double>(), sum, 1e-5 * sum);
    EXPECT_EQ(losses[1].template item<double>(), 0);
    this->expect_close(found, expected);
  }
}

TYPED_TEST(GpuLoops, SquaresAreSummedInDouble) {
  constexpr int64_t kCount = 517;
  constexpr unsigned kBlocks = 3;
  const auto x = this->random({kCount});
  const auto parts = at::empty({kBlocks}, at::kDouble);
  this->run({kBlocks, 1}, [&] {
    cuda::squares(this->data(x), parts.template mutable_data_ptr<double>(),
                  kCount);
  });
  const auto wanted = x.to(at::kDouble).square().sum().template item<double>();
  EXPECT_NEAR(parts.sum().template item<double>(), wanted, 1e-12 * wanted);
}

TYPED_TEST(GpuLoops, ATargetThatIsNoneMakesNoNumber) {
  const auto logits = this->random({2, 9});
  const auto targets = at::tensor({int64_t{9}, int64_t{-1}});
  const auto losses = at::empty({2}, at::kDouble);
  this->run({2, 1}, [&] {
    cuda::cross_entropy(
        this->data(logits),
        reinterpret_cast<const long long*>(targets.const_data_ptr<int64_t>()),
        -100LL, losses.template mutable_data_ptr<double>(), 9, 1, 1.0);
  });
  EXPECT_TRUE(at::isnan(losses).all().template item<bool>());
  EXPECT_TRUE(at::isnan(logits).all().template item<bool>());
}

}  // namespace
}  // namespace tessera::nn
