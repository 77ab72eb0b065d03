// The loops for GPUs on this host's threads, beside those for the CPU; and that
// NVRTC takes them is tests/parity/test_gpu_loops.py's.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/nn/detail/kernel_table.h"
#include "tessera/nn/detail/mask.h"
#include "tessera/nn/detail/one_pass.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/fp8_product.h"
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

// Of rows in packs or not, by a warp or a block; of packs that a thread keeps
// all or some.
template <int64_t of_row, int of, int kept>
struct RowShape {
  static constexpr int64_t kWidth = of_row;
  static constexpr int kTeam = of, kNear = kept, kTeams = cuda::kThreads / of;
};
template <typename Check>
void for_shapes(Check check) {
  check(RowShape<150, cuda::kThreads, 1>());
  check(RowShape<150, cuda::kWarp, 2>());
  check(RowShape<152, cuda::kThreads, 4>());
  check(RowShape<152, cuda::kWarp, 2>());
  check(RowShape<1032, cuda::kWarp, 2>());
  check(RowShape<2064, cuda::kThreads, 2>());
}
constexpr int64_t kRows = 5, kRowsAPart = 3;

TYPED_TEST(GpuLoops, RmsNormsAndTheirGradients) {
  for_shapes([&](auto shape) {
    using Of = decltype(shape);
    constexpr int64_t width = Of::kWidth, teams = Of::kTeams;
    const auto x = this->random({kRows, width}), weight = this->random({width});
    const auto dy = this->random({kRows, width}),
               past = this->random({kRows, width});
    const unsigned each = (kRows + teams - 1) / teams;
    for (const double offset : {0.0, 1.0}) {
      const cuda::NormOf<typename TestFixture::T> by = {
          this->data(weight), nullptr, offset, kRows, width};
      const auto [y, scales] =
          detail::rms_norm_forward(x, weight, 1e-5, offset);
      const auto found = this->like(y), found_scales = this->like(scales);
      this->run({each, 1}, [&] {
        cuda::norm<false, Of::kTeam, Of::kNear>(
            this->data(x), by, this->data(found), this->wide(found_scales),
            this->wide(found_scales), 1e-5);
      });
      this->expect_close(found, y);
      this->expect_close(found_scales, scales);
      for (const bool adds : {false, true}) {
        const auto [dx, dweight] = detail::rms_norm_backward(
            dy, x, weight, scales, offset, adds ? past : at::Tensor());
        const auto found_dx = this->like(dx);
        const auto parts = at::full({2, width}, NAN, scales.options());
        this->run({static_cast<unsigned>(2 / teams), 1}, [&, adds] {
          cuda::norm_backward<false, Of::kTeam, Of::kNear>(
              this->data(dy), this->data(x), by, this->wide(scales),
              this->wide(scales), adds ? this->data(past) : nullptr,
              this->data(found_dx), this->wide(parts), this->wide(parts),
              kRowsAPart);
        });
        this->expect_close(found_dx, dx);
        this->expect_close(parts.sum(0).to(dweight.scalar_type()), dweight);
      }
    }
  });
}

TYPED_TEST(GpuLoops, LayerNormsAndTheirGradients) {
  for_shapes([&](auto shape) {
    using Of = decltype(shape);
    constexpr int64_t width = Of::kWidth, teams = Of::kTeams;
    const auto x = this->random({kRows, width}), weight = this->random({width}),
               bias = this->random({width});
    const auto dy = this->random({kRows, width}),
               past = this->random({kRows, width});
    const cuda::NormOf<typename TestFixture::T> by = {
        this->data(weight), this->data(bias), 0, kRows, width};
    const at::Tensor wide_x = x.to(at::kDouble);
    const auto wide_y = at::native_layer_norm(
        wide_x, {width}, weight.to(at::kDouble), bias.to(at::kDouble), 1e-5);
    const auto y = this->like(x);
    const auto means = at::empty({kRows, 1}, wide_type(x));
    const auto scales = this->like(means);
    this->run({static_cast<unsigned>((kRows + teams - 1) / teams), 1}, [&] {
      cuda::norm<true, Of::kTeam, Of::kNear>(this->data(x), by, this->data(y),
                                             this->wide(means),
                                             this->wide(scales), 1e-5);
    });
    this->expect_close(y, std::get<0>(wide_y).to(y.scalar_type()));
    this->expect_close(means, std::get<1>(wide_y).to(means.scalar_type()));
    this->expect_close(scales, std::get<2>(wide_y).to(means.scalar_type()));
    const auto [dx, dweight, dbias] = at::native_layer_norm_backward(
        dy.to(at::kDouble), wide_x, {width}, std::get<1>(wide_y),
        std::get<2>(wide_y), weight.to(at::kDouble), bias.to(at::kDouble),
        {true, true, true});
    for (const bool adds : {false, true}) {
      const auto found = this->like(x);
      const auto parts = at::full({2, 2, width}, NAN, means.options());
      this->run({static_cast<unsigned>(2 / teams), 1}, [&, adds] {
        cuda::norm_backward<true, Of::kTeam, Of::kNear>(
            this->data(dy), this->data(x), by, this->wide(means),
            this->wide(scales), adds ? this->data(past) : nullptr,
            this->data(found), this->wide(parts[0]), this->wide(parts[1]),
            kRowsAPart);
      });
      const at::Tensor expected = adds ? dx + past.to(at::kDouble) : dx;
      this->expect_close(found, expected.to(x.scalar_type()));
      this->expect_close(parts[0].sum(0), dweight.to(parts.scalar_type()));
      this->expect_close(parts[1].sum(0), dbias.to(parts.scalar_type()));
    }
  });
}

// Two choices of five tokens, of which one is dropped; in packs or not, by a
// warp or a block.
TYPED_TEST(GpuLoops, RowsOfExpertsAndTheirGradients) {
  constexpr int64_t kTokens = 5, kChoices = 2, kCount = 9;
  const at::Tensor row =
      at::tensor({3, 0, 8, 1, 9, 4, 2, 7, 6, 5}, at::kLong).view({5, 2});
  const auto* const row_data =
      reinterpret_cast<const long long*>(row.const_data_ptr<int64_t>());
  for (const int64_t width : {45, 48}) {
    for (const int teams : {1, 2}) {
      const auto rows = this->random({kCount, width});
      const auto dy = this->random({kTokens, width});
      const auto weights =
          at::rand({kTokens, kChoices}, at::kDouble).to(wide_type(rows));
      const unsigned blocks = (kTokens + teams - 1) / teams;
      for (const bool weighs : {false, true}) {
        const auto y = this->like(dy);
        this->run({blocks, 1}, [&, weighs, teams] {
          cuda::add_up_rows(this->data(rows), row_data,
                            weighs ? this->wide(weights) : nullptr,
                            this->data(y), kTokens, kChoices, kCount, width,
                            teams);
        });
        this->expect_close(
            y, detail::add_up_rows(rows, row, weighs ? weights : at::Tensor()));
      }
      const auto drows = this->like(rows), dweights = this->like(weights);
      this->run({blocks, 1}, [&, teams] {
        cuda::add_up_rows_backward(this->data(dy), this->data(rows), row_data,
                                   this->wide(weights), this->data(drows),
                                   this->wide(dweights), kTokens, kChoices,
                                   kCount, width, teams);
      });
      const auto [expected_rows, expected_weights] =
          detail::add_up_rows_backward(dy, rows, row, weights);
      this->expect_close(drows, expected_rows);
      this->expect_close(dweights, expected_weights);
    }
  }
}

TYPED_TEST(GpuLoops, SumsOfColumns) {
  for (const int64_t width : {45, 600}) {
    const auto x = this->random({11, width});
    const bool in_packs = width % 8 == 0;
    const int64_t columns = in_packs ? width * x.itemsize() / 16 : width;
    const auto lots = static_cast<unsigned>((columns + 31) / 32);
    const auto parts = at::full({3, width}, NAN, wide_type(x));
    this->run({3 * lots, 1}, [&] {
      cuda::column_sums(this->data(x), this->wide(parts), 11, 5, width,
                        in_packs);
    });
    this->expect_close(parts.sum(0).to(x.scalar_type()),
                       x.to(wide_type(x)).sum(0).to(x.scalar_type()));
  }
}

// Of rows in packs or not, by a warp or a block; with numbers that are small
// beside the largest of their row, and none at all. Bit by bit.
TEST(GpuLoopsOfFp8, RowsAndColumnsAreThoseOfTheCpu) {
  const auto data = [](const at::Tensor& x) {
    return static_cast<cuda::Bf16*>(x.data_ptr());
  };
  const auto bytes = [](const at::Tensor& x) {
    return static_cast<unsigned char*>(x.data_ptr());
  };
  constexpr int64_t kRows = 80;
  for (const int64_t width : {45, 48, 144}) {
    const auto x =
        (at::randn({kRows, width}) * at::logspace(-7, 2, width).unsqueeze(0))
            .to(at::kBFloat16);
    x[2].zero_();
    x[3][4] = NAN;
    const Fp8Rows wanted = fp8_rows(x.nan_to_num(0.0));
    for (const int teams : {1, 2}) {
      const auto values = at::empty_like(wanted.values);
      const auto scales = at::empty_like(wanted.scales);
      cuda::launch({static_cast<unsigned>(kRows / teams), 1}, cuda::kThreads,
                   [&, teams, width = width] {
                     cuda::fp8_rows(data(x), bytes(values),
                                    scales.mutable_data_ptr<float>(), kRows,
                                    width, width, teams);
                   });
      const auto found = values.view(at::kByte).clone();
      EXPECT_EQ(found[3][4].item<uint8_t>(), 0x7f);
      found[3][4] = 0;
      EXPECT_TRUE(found.equal(wanted.values.view(at::kByte)));
      EXPECT_TRUE(scales.equal(wanted.scales));
    }
    if (width % 16 != 0) continue;
    const auto numbers = x.nan_to_num(0.0);
    const auto most = numbers.abs().amax(0).to(at::kFloat);
    const auto parts = at::full({3, width}, NAN);
    const auto lots = static_cast<unsigned>((width / 8 + 31) / 32);
    cuda::launch({3 * lots, 1}, cuda::kThreads, [&, width = width] {
      cuda::largest_of_columns(data(numbers), parts.mutable_data_ptr<float>(),
                               kRows, 30LL, width, /*in_packs=*/1);
    });
    EXPECT_TRUE(parts.amax(0).equal(most));
    const Fp8Rows columns = fp8_columns(numbers);
    const auto values = at::empty_like(columns.values);
    const auto scales = at::empty_like(columns.scales);
    const auto squares = static_cast<unsigned>(2 * ((width + 63) / 64));
    cuda::launch({squares, 1}, cuda::kThreads, [&, width = width] {
      cuda::fp8_columns(data(numbers), most.const_data_ptr<float>(),
                        bytes(values), scales.mutable_data_ptr<float>(), kRows,
                        width);
    });
    EXPECT_TRUE(values.view(at::kByte).equal(columns.values.view(at::kByte)));
    EXPECT_TRUE(scales.equal(columns.scales));
  }
}

TYPED_TEST(GpuLoops, GatesAndTheirGradients) {
  const auto gate = this->random({7, 45}) * 3, up = this->random({7, 45});
  const auto dy = this->random({7, 45});
  for (const auto kind : {detail::Gate::kSilu, detail::Gate::kGelu}) {
    const bool is_silu = kind == detail::Gate::kSilu;
    const auto y = this->like(up), both = at::empty({7, 90}, up.options());
    const auto dgate = both.narrow(1, 0, 45), dup = both.narrow(1, 45, 45);
    this->run({3, 1}, [&] {
      cuda::glu(is_silu, this->data(gate), this->data(up), this->data(y),
                up.numel());
    });
    this->expect_close(y, detail::glu(kind, gate, up));
    this->run({3, 1}, [&] {
      cuda::glu_backward(is_silu, this->data(dy), this->data(gate),
                         this->data(up), this->data(dgate), this->data(dup),
                         up.numel(), 45);
    });
    const auto [expected_dgate, expected_dup] =
        detail::glu_backward(kind, dy, gate, up);
    this->expect_close(dgate, expected_dgate);
    this->expect_close(dup, expected_dup);
  }
}

TYPED_TEST(GpuLoops, RotationsAndBack) {
  constexpr int64_t kTokens = 5, kHeads = 3;
  for (const int64_t half : {3, 16}) {
    const auto x = this->random({2, kTokens, kHeads, 2 * half});
    const auto angles = at::randn({kTokens, half}, at::kDouble);
    const auto cos = angles.cos().to(wide_type(x));
    const auto sin = angles.sin().to(wide_type(x));
    for (const double direction : {1.0, -1.0}) {
      const auto y = this->like(x);
      this->run({2 * kTokens, 1}, [&] {
        cuda::rotate(this->data(x), this->wide(cos), this->wide(sin),
                     this->data(y), 2 * kTokens, kTokens, kHeads,
                     static_cast<int>(half), direction);
      });
      this->expect_close(
          y, detail::rotate(x, cos, sin, direction, /*in_place=*/false));
    }
  }
}

TYPED_TEST(GpuLoops, LossesAndTheirGradients) {
  constexpr int64_t kLogits = 4, kWidth = 131, kIgnored = -100;
  // Rows apart from each other as they are to be in packs, or not.
  for (const int64_t stride : {131, 136}) {
    const auto logits =
        (this->random({kLogits, stride}) * 4).narrow(1, 0, kWidth);
    const auto targets =
        at::tensor({int64_t{7}, kIgnored, int64_t{130}, int64_t{0}});
    for (const bool scaled : {false, true}) {
      const auto expected = logits.contiguous().clone();
      const auto whole = at::full({kLogits, stride}, 7, logits.options());
      const auto found = whole.narrow(1, 0, kWidth);
      found.copy_(logits);
      const double sum =
          detail::cross_entropy(expected, targets, kIgnored,
                                scaled ? std::optional(0.25) : std::nullopt)
              .template item<double>();
      const auto losses = at::empty({kLogits}, at::kDouble);
      this->run({kLogits, 1}, [&] {
        cuda::cross_entropy(this->data(found),
                            reinterpret_cast<const long long*>(
                                targets.const_data_ptr<int64_t>()),
                            kIgnored,
                            losses.template mutable_data_ptr<double>(), kWidth,
                            stride, scaled, 0.25);
      });
      EXPECT_NEAR(losses.sum().template item<double>(), sum, 1e-5 * sum);
      EXPECT_EQ(losses[1].template item<double>(), 0);
      this->expect_close(found, expected);
      EXPECT_TRUE((whole.narrow(1, kWidth, stride - kWidth) == 7)
                      .all()
                      .template item<bool>());
    }
  }
}

// Of three samples that lie apart, two heads each; masks from any column on.
TYPED_TEST(GpuLoops, MasksKeepWhatTheCpusKeep) {
  constexpr int64_t kSamples = 3, kHeads = 2, kTokens = 4, kFirstRow = 9;
  Dropout dropout = dropout_named("a part", 0.3, {7, 3, 5});
  dropout.first_head = 6;
  const kernels::Mask whole = detail::mask_of(dropout, 0, 0);
  const cuda::Mask mask = {{whole.key[0], whole.key[1]},
                           whole.drops,
                           whole.sample,
                           whole.head,
                           whole.scale};
  for (const int64_t width : {5, 64, 150}) {
    for (const int64_t first : {0, 33, 128}) {
      const auto all = this->random({kSamples, kHeads + 1, kTokens, width});
      const auto x = all.narrow(1, 0, kHeads);
      const cuda::DroppedRows of = {kSamples * kHeads * kTokens,
                                    kHeads,
                                    kTokens,
                                    width,
                                    x.stride(0),
                                    kFirstRow,
                                    first};
      const auto keep = [&](const at::Tensor& past, const at::Tensor& y) {
        this->run({3, 1}, [&] {
          cuda::drop(past.defined() ? this->data(past) : nullptr, this->data(x),
                     this->data(y), mask, of);
        });
      };
      // The CPU's, in whole rows from the first column on.
      const at::Tensor rows =
          at::zeros({x.size(0), kHeads, kTokens, first + width}, x.options());
      const at::Tensor behind = rows.narrow(3, first, width);
      behind.copy_(x);
      for (int64_t b = 0; b < kSamples; ++b) {
        for (int64_t h = 0; h < kHeads; ++h) {
          for (int64_t t = 0; t < kTokens; ++t) {
            const at::Tensor row = rows[b][h][t];
            detail::table().drop(detail::element_of(row),
                                 detail::mask_of(dropout, b, h), kFirstRow + t,
                                 nullptr, row.data_ptr(), row.data_ptr(),
                                 row.numel());
          }
        }
      }
      const auto y = this->like(all), past = this->random(all.sizes());
      const at::Tensor here = y.narrow(1, 0, kHeads);
      keep({}, y);
      EXPECT_TRUE(at::equal(here, behind)) << width << " from " << first;
      keep(past, y);
      this->expect_close(here, past.narrow(1, 0, kHeads) + behind);
      keep({}, all);  // in place
      EXPECT_TRUE(at::equal(x, behind)) << width << " from " << first;
    }
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

// The second of three groups has no row, and nobody wrote its part.
TEST(GpuLoopsOfGroups, GradientsAreThoseOfGroupsWithRows) {
  for (const int64_t width : {24, 45}) {
    const auto all = at::randn({3, width}).to(at::kBFloat16);
    all[1].fill_(std::numeric_limits<float>::quiet_NaN());
    const auto ends = at::tensor({2, 2, 5}, at::kInt);
    for (const bool adds : {false, true}) {
      const auto gradient = at::randn({3, width});
      const auto before = adds ? gradient.clone() : at::zeros({3, width});
      cuda::launch({6, 1}, cuda::kThreads, [&, width = width] {
        cuda::take_groups(gradient.mutable_data_ptr<float>(),
                          static_cast<const cuda::Bf16*>(all.data_ptr()),
                          ends.const_data_ptr<int>(), width, /*blocks=*/2,
                          adds);
      });
      const auto more = all.to(at::kFloat).nan_to_num(0);
      EXPECT_TRUE(gradient.equal(before + more)) << width;
    }
  }
}

TYPED_TEST(GpuLoops, ATargetThatIsNoneMakesNoNumber) {
  const auto logits = this->random({2, 9});
  const auto targets = at::tensor({int64_t{9}, int64_t{-1}});
  const auto losses = at::empty({2}, at::kDouble);
  this->run({2, 1}, [&] {
    cuda::cross_entropy(
        this->data(logits),
        reinterpret_cast<const long long*>(targets.const_data_ptr<int64_t>()),
        -100LL, losses.template mutable_data_ptr<double>(), 9, 9, 1, 1.0);
  });
  EXPECT_TRUE(at::isnan(losses).all().template item<bool>());
  EXPECT_TRUE(at::isnan(logits).all().template item<bool>());
}

}  // namespace
}  // namespace tessera::nn
