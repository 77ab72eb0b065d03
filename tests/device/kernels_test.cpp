// Loops and products on a device, beside the CPU's.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/core/host_read.h"
#include "tessera/nn/composed_attention.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/flash_attention.h"
#include "tessera/nn/grouped_linear.h"
#include "tests/device/device_runs.h"

namespace tessera::testing {
namespace {

TEST(TestDevice, ComputesAsTheCpuDoes) {
  if (!testing::has_test_device()) GTEST_SKIP() << kNoDevice;
  const at::Tensor a = at::randn({4, 6}), b = at::randn({6, 3});
  const at::Device there = testing::test_device();
  const at::Tensor x = a.to(there).requires_grad_();
  const at::Tensor y = at::matmul(x, b.to(there)).relu();
  y.sum().backward();
  EXPECT_TRUE(at::equal(y.cpu(), at::matmul(a, b).relu()));
  EXPECT_EQ(x.grad().device(), there);
  EXPECT_GT(testing::reads_of_device(), 0);
}

TEST(TestDeviceDeathTest, CannotBeReachedByTheHost) {
  if (!testing::has_test_device()) GTEST_SKIP() << kNoDevice;
  const at::Tensor x = at::ones({3}, testing::test_device());
  EXPECT_DEATH(std::printf("%f", *x.const_data_ptr<float>()), "");
  EXPECT_THROW(x.add(at::ones({3})), std::exception);
}

// Else LibTorch's operators would stand in for them, and nothing would fail.
TEST(Gpu, HasLoopsOfItsOwn) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    EXPECT_TRUE(
        nn::gpu::runs(at::ones({1}, at::TensorOptions(at::kCUDA).dtype(type))));
  }
}

// What one mask keeps of ones, and the gradient that goes back through another.
TEST(DropoutOnADevice, MasksAreThoseOfTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const nn::Dropout dropout = nn::dropout_named("a part", 0.3, {7, 3, 5});
  // Two pieces of a longer sequence, of odd lengths.
  const nn::Positions positions = {{5, 7}, {40, 6}};
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t width : {1, 63, 64, 65, 200}) {
      const auto kept = [&](at::Device where) {
        const at::Tensor x =
            at::ones({3, 13, width}, type).to(where).requires_grad_();
        const at::Tensor y = nn::add_kept({}, x.view_as(x), dropout, positions);
        y.sum().backward();
        return at::stack({y.detach(), x.grad()}).cpu();
      };
      EXPECT_TRUE(at::equal(kept(*device()), kept(at::kCPU))) << type << width;
    }
  }
}

// Of some heads of some samples, over keys behind the first ones; in parts of
// the samples where their scores are many.
TEST(DropoutOnADevice, AttentionDropsWhatTheCpusDrops) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const auto random = [](int64_t heads, int64_t tokens) {
    return at::randn({2, heads, tokens, 8}, at::kDouble);
  };
  nn::FlashRuns runs = {.is_causal = false,
                        .dropout = nn::dropout_named("weights", 0.4, {1, 2, 3}),
                        .first_query = 130,
                        .first_key = 37,
                        .window = 150};
  runs.dropout.first_head = 4;
  const at::Tensor q = random(4, 30), k = random(2, 90), v = random(2, 90);
  const at::Tensor gradient = random(4, 30);
  const auto there = [](const at::Tensor& x) { return x.to(*device()); };
  const auto by_token = [](const at::Tensor& x) {
    return x.transpose(1, 2).contiguous();
  };
  const auto [out, lse] =
      nn::composed_attention(there(q), there(k), there(v), runs);
  const auto [wanted, wanted_lse] =
      nn::flash_forward(by_token(q), by_token(k), by_token(v), runs);
  const auto is_near = [](const at::Tensor& a, const at::Tensor& b) {
    return at::allclose(a.cpu(), b, 1e-12, 1e-12);
  };
  EXPECT_TRUE(is_near(out, wanted.transpose(1, 2)));
  EXPECT_TRUE(is_near(lse, wanted_lse));
  const auto [dq, dk, dv] = nn::composed_attention_backward(
      there(gradient), there(q), there(k), there(v), out, lse, runs);
  const auto [wanted_dq, wanted_dk, wanted_dv] =
      nn::flash_backward(by_token(gradient), by_token(q), by_token(k),
                         by_token(v), wanted, wanted_lse, runs);
  EXPECT_TRUE(is_near(dq, wanted_dq.transpose(1, 2)));
  EXPECT_TRUE(is_near(dk, wanted_dk.transpose(1, 2)));
  EXPECT_TRUE(is_near(dv, wanted_dv.transpose(1, 2)));
}

// The same bits in fp8; products as far apart as their sums, rounded to bf16.
// Of rows by a warp and by a block, in packs and not, and of one row alone.
TEST(OfADevice, Fp8ProductsAreThoseOfTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  if (!multiplies_fp8()) GTEST_SKIP() << kNoFp8;
  const auto there = [](const at::Tensor& x) { return x.to(*device()); };
  const auto expect_same = [](const nn::Fp8Rows& found,
                              const nn::Fp8Rows& wanted) {
    EXPECT_TRUE(found.values.view(at::kByte).cpu().equal(
        wanted.values.view(at::kByte)));
    EXPECT_TRUE(found.scales.cpu().equal(wanted.scales));
  };
  struct Shape {
    int64_t rows, in, out, begin;
  };
  for (const auto& [rows, in, out, begin] :
       {Shape{1, 16, 32, 0}, {300, 144, 96, 1}, {64, 2048, 528, 0}}) {
    const at::Tensor x =
        (at::randn({rows, in}) * at::logspace(-4, 2, in)).to(at::kBFloat16);
    const at::Tensor bias = at::randn({out}).to(at::kBFloat16);
    // Not where moves of 16 bytes can begin.
    const at::Tensor memory = at::randn({out * in + begin}).to(at::kBFloat16);
    const auto weight_of = [&, in = in, out = out,
                            begin = begin](const at::Tensor& from) {
      return from.narrow(0, begin, out * in).view({out, in});
    };
    const at::Tensor weight = weight_of(memory);
    const at::Tensor weight_there = weight_of(there(memory));
    const auto a = nn::fp8_rows(x), b = nn::fp8_rows(weight);
    const auto a_there = nn::fp8_rows(there(x));
    const auto b_there = nn::fp8_rows(weight_there);
    expect_same(a_there, a);
    expect_same(b_there, b);
    expect_same(nn::fp8_columns(weight_there), nn::fp8_columns(weight));
    for (const auto sums : {nn::Sums::kExact, nn::Sums::kFast}) {
      for (const at::Tensor& added : {at::Tensor(), bias}) {
        const at::Tensor y = at::empty({rows, out}, x.options());
        const at::Tensor found = at::empty({rows, out}, weight_there.options());
        nn::fp8_product_into(y, a, b, added, sums);
        nn::fp8_product_into(found, a_there, b_there,
                             added.defined() ? there(added) : added, sums);
        const auto error = (found.cpu().to(at::kDouble) - y).norm() / y.norm();
        EXPECT_LT(error.item<double>(), 5e-3) << rows << " rows";
      }
    }
  }
}

// The second and the last of these have no row.
TEST(OfADevice, GroupedProductsAreThoseOfTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const std::vector<int64_t> sizes = {2, 0, 5, 0};
  const auto options = at::TensorOptions(at::kBFloat16);
  const auto rows = at::randn({7, 24}, options),
             weight = at::randn({4, 16, 24}, options),
             gradient = at::randn({7, 16}, options);
  const auto run = [&](at::Device device, const nn::RowGroups& groups) {
    const auto x = rows.clone().to(device).requires_grad_(),
               w = weight.clone().to(device).requires_grad_();
    const auto y = nn::grouped_product(x, w, groups);
    y.backward(gradient.to(device));
    return std::vector<at::Tensor>{y.detach(), x.grad(), w.grad()};
  };
  const auto here = run(at::kCPU, nn::RowGroups(sizes));
  const int64_t before = host_reads();
  const auto there =
      run(*device(), nn::RowGroups(at::tensor(sizes).to(*device()), 7));
  EXPECT_EQ(host_reads() - before, multiplies_groups() ? 0 : 1);
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_TRUE(at::allclose(there[i].to(at::kCPU), here[i], 1e-2, 1e-2)) << i;
  }
}

}  // namespace
}  // namespace tessera::testing
