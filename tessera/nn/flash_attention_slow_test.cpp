// Beside fp64 and LibTorch's flash attention, with each set of vectors.
#include "tessera/nn/flash_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tessera/nn/detail/flash.h"
#include "tessera/nn/detail/kernel_table.h"
#include "tests/support/masks.h"

namespace tessera::nn {
namespace {

using kernels::Kernels;

struct Inputs {
  at::Tensor q, k, v, gradient;
};
struct Outputs {
  at::Tensor out, lse, dq, dk, dv;
  std::vector<at::Tensor> all() const { return {out, lse, dq, dk, dv}; }
};

Inputs random_inputs(const FlashShape& shape, at::ScalarType type,
                     double spread = 1) {
  const auto of_heads = [&](int64_t heads) {
    return (at::randn({shape.samples, shape.tokens, heads, shape.width},
                      at::kDouble) *
            spread)
        .to(type);
  };
  return {of_heads(shape.heads), of_heads(shape.kv_heads),
          of_heads(shape.kv_heads), of_heads(shape.heads)};
}

Outputs own(const Kernels& by, const Inputs& of, const FlashRuns& runs = {}) {
  Outputs found;
  std::tie(found.out, found.lse) =
      detail::flash_forward(by, of.q, of.k, of.v, runs);
  std::tie(found.dq, found.dk, found.dv) = detail::flash_backward(
      by, of.gradient, of.q, of.k, of.v, found.out, found.lse, runs);
  return found;
}

at::Tensor by_head(const at::Tensor& x) { return x.transpose(1, 2); }

Outputs of_libtorch(const Inputs& of) {
  Outputs found;
  const at::Tensor q = by_head(of.q), k = by_head(of.k), v = by_head(of.v);
  std::tie(found.out, found.lse) =
      at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true);
  std::tie(found.dq, found.dk, found.dv) =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          by_head(of.gradient), q, k, v, found.out, found.lse, 0.0, true);
  for (at::Tensor* each : {&found.out, &found.dq, &found.dk, &found.dv}) {
    *each = by_head(*each);
  }
  return found;
}

constexpr double kNoLse = -1e30;  // lse of a query that sees no key

// By the formulas, in fp64.
Outputs exact(const Inputs& of, const FlashRuns& runs = {}) {
  const auto leaf = [](const at::Tensor& x) {
    return x.to(at::kDouble).clone().requires_grad_();
  };
  const at::Tensor q = leaf(of.q), k = leaf(of.k), v = leaf(of.v);
  const int64_t repeats = q.size(2) / k.size(2);
  const auto wide = [&](const at::Tensor& x) {
    return by_head(x.repeat_interleave(repeats, 2));
  };
  const at::Tensor query = at::arange(q.size(1)).unsqueeze(1),
                   key = at::arange(k.size(1));
  at::Tensor hidden = key > (runs.is_causal ? query : query + k.size(1));
  if (runs.window > 0) {
    hidden = hidden.logical_or(key + runs.first_key <=
                               query + runs.first_query - runs.window);
  }
  const at::Tensor scores = (at::matmul(by_head(q), wide(k).transpose(2, 3)) /
                             std::sqrt(static_cast<double>(q.size(3))))
                                .masked_fill(hidden, -1e300);
  at::Tensor weights = scores.softmax(-1).masked_fill(hidden, 0);
  if (runs.dropout) {
    weights =
        weights * masks::mask_of(runs.dropout, q.size(0), q.size(2),
                                 masks::run_of(runs.first_query, q.size(1)),
                                 masks::run_of(runs.first_key, k.size(1)));
  }
  const at::Tensor out = by_head(at::matmul(weights, wide(v)));
  out.backward(of.gradient.to(at::kDouble));
  const at::Tensor lse = scores.logsumexp(-1).detach();
  return {out.detach(), lse.masked_fill(hidden.all(-1), kNoLse), q.grad(),
          k.grad(), v.grad()};
}

// In units of the largest wanted; of the inputs, where less is wanted: a single
// token's dq is 0, the difference of sums that are as large as those.
double error_of(const at::Tensor& found, const at::Tensor& wanted) {
  const double worst =
      (found.to(at::kDouble) - wanted).abs().max().item<double>();
  return worst / std::max(wanted.abs().max().item<double>(), 1.0);
}

double unit_of(at::ScalarType type) {
  return type == at::kDouble  ? 0x1p-52
         : type == at::kFloat ? 0x1p-23
         : type == at::kHalf  ? 0x1p-11
                              : 0x1p-8;
}

struct Case {
  const Kernels* kernels;
  at::ScalarType type;
  FlashShape shape;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Kernels* each : detail::tables_that_run_here()) {
    for (const auto type :
         {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const FlashShape& shape : std::vector<FlashShape>{
               {2, 1, 2, 2, 8},
               {1, 7, 3, 1, 5},
               {1, 63, 2, 1, 2},
               {2, 65, 4, 2, 24},
               {1, 128, 1, 1, 128},
               {1, 191, 4, 2, 33},
               {1, 257, 6, 2, 64},
               {1, 700, 2, 1, 80},
           }) {
        all.push_back({each, type, shape});
      }
    }
  }
  return all;
}

class FlashOf : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { at::manual_seed(7); }
  const Kernels& kernels() const { return *GetParam().kernels; }
  Inputs inputs() const {
    return random_inputs(GetParam().shape, GetParam().type);
  }
};

TEST_P(FlashOf, ErrsNoMoreThanLibTorch) {
  const Inputs of = inputs();
  const auto wanted = exact(of).all(), found = own(kernels(), of).all(),
             theirs = of_libtorch(of).all();
  const std::vector<std::string> names = {"out", "lse", "dq", "dk", "dv"};
  for (size_t i = 0; i < found.size(); ++i) {
    const double unit = unit_of(found[i].scalar_type());
    EXPECT_LE(error_of(found[i], wanted[i]),
              std::max(2 * error_of(theirs[i], wanted[i]), 8 * unit))
        << names[i];
  }
}

// What is rounded to bf16 on the way is the same: P and dS. Of few elements the
// two may be further apart by chance.
TEST_P(FlashOf, ErrsAsLibTorchOnTheWhole) {
  const Inputs of = inputs();
  if (of.q.scalar_type() != at::kBFloat16 || of.q.size(1) < 63) return;
  const auto wanted = exact(of).all(), found = own(kernels(), of).all(),
             theirs = of_libtorch(of).all();
  const auto mean_error = [&](const at::Tensor& each, size_t i) {
    const at::Tensor error = each.to(at::kDouble) - wanted[i];
    return error.square().mean().sqrt().item<double>();
  };
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_LE(mean_error(found[i], i), 1.5 * mean_error(theirs[i], i)) << i;
  }
}

// As one product for q, k and v gives them: slices of one tensor.
TEST_P(FlashOf, StridesDoNotMatter) {
  const Inputs of = inputs();
  const int64_t heads = of.q.size(2), kv_heads = of.k.size(2);
  const at::Tensor together = at::cat({of.q, of.k, of.v}, 2);
  const Inputs slices = {together.narrow(2, 0, heads),
                         together.narrow(2, heads, kv_heads),
                         together.narrow(2, heads + kv_heads, kv_heads),
                         by_head(by_head(of.gradient).contiguous())};
  ASSERT_TRUE(takes_flash(slices.q, slices.k, slices.v));
  const auto wanted = own(kernels(), of).all();
  const auto found = own(kernels(), slices).all();
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::equal(found[i], wanted[i])) << i;
    EXPECT_TRUE(found[i].is_contiguous());
  }
}

TEST_P(FlashOf, ThreadsDoNotMatter) {
  const Inputs of = inputs();
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const auto wanted = own(kernels(), of).all();
  for (const int threads : {2, 3, 5}) {
    at::set_num_threads(threads);
    const auto found = own(kernels(), of).all();
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], wanted[i])) << threads << ' ' << i;
    }
  }
  at::set_num_threads(before);
}

// Also what is not a number stays where it is.
TEST_P(FlashOf, LaterTokensDoNotMatter) {
  Inputs of = inputs();
  const int64_t tokens = of.q.size(1), seen = (tokens + 1) / 2;
  const at::Tensor wanted = own(kernels(), of).out.narrow(1, 0, seen);
  of.k.narrow(1, seen, tokens - seen).fill_(NAN);
  const at::Tensor found = own(kernels(), of).out;
  EXPECT_TRUE(at::equal(found.narrow(1, 0, seen), wanted));
  EXPECT_TRUE(found.narrow(1, seen, tokens - seen).isnan().all().item<bool>());
}

// Scores of some hundreds, whose exponentials no type of ours holds.
TEST_P(FlashOf, LargeScoresDoNotOverflow) {
  const Inputs of = random_inputs(GetParam().shape, GetParam().type, 20);
  const Outputs found = own(kernels(), of), wanted = exact(of);
  EXPECT_TRUE(found.out.isfinite().all().item<bool>());
  EXPECT_LE(error_of(found.lse, wanted.lse),
            8 * unit_of(found.lse.scalar_type()));
}

// Beside what the loops err without what is tried. Of few keys little is left
// of dS, a difference of sums over E.
void expect_close(const Outputs& found, const Outputs& wanted,
                  const Outputs& plain, const Outputs& plain_wanted) {
  const auto all = found.all(), exact = wanted.all();
  for (size_t i = 0; i < all.size(); ++i) {
    const at::ScalarType type = all[i].scalar_type();
    const double most = type == at::kDouble || type == at::kFloat ? 128 : 16;
    EXPECT_LE(error_of(all[i], exact[i]),
              std::max(3 * error_of(plain.all()[i], plain_wanted.all()[i]),
                       most * unit_of(type)))
        << i;
  }
}

// Its edge lies within blocks of 64, and between them.
TEST_P(FlashOf, KeepsToItsWindow) {
  const Inputs of = inputs();
  const int64_t tokens = of.q.size(1);
  for (const int64_t window :
       {int64_t{1}, int64_t{2}, int64_t{63}, int64_t{64}, int64_t{65},
        int64_t{130}, tokens - 1, tokens, tokens + 7}) {
    if (window < 1) continue;
    const FlashRuns runs{.window = window};
    expect_close(own(kernels(), of, runs), exact(of, runs), own(kernels(), of),
                 exact(of));
  }
}

// Runs of other tokens, which are partly or all too far behind.
TEST_P(FlashOf, KeepsToItsWindowOverRuns) {
  Inputs of = inputs();
  const int64_t keys = (of.k.size(1) + 1) / 2;
  of.k = of.k.narrow(1, 0, keys), of.v = of.v.narrow(1, 0, keys);
  const FlashRuns plain{.is_causal = false};
  for (const int64_t distance : {keys, keys + 5, keys + 70}) {
    for (const int64_t window : {distance - keys + 1, distance - keys / 2,
                                 distance + 3, distance + of.q.size(1) - 2}) {
      if (window < 1) continue;
      FlashRuns runs{.is_causal = false,
                     .first_query = 11 + distance,
                     .first_key = 11,
                     .window = window};
      Outputs found = own(kernels(), of, runs), wanted = exact(of, runs);
      const at::Tensor sees_none = wanted.lse == kNoLse;
      EXPECT_TRUE(at::equal(found.lse < kNoLse / 2, sees_none));
      found.lse.masked_fill_(sees_none, 0);
      wanted.lse.masked_fill_(sees_none, 0);
      expect_close(found, wanted, own(kernels(), of, plain), exact(of, plain));
    }
  }
}

// Blocks that no query sees are not looked at.
TEST_P(FlashOf, EarlierTokensDoNotMatter) {
  Inputs of = inputs();
  const int64_t tokens = of.q.size(1);
  constexpr int64_t kHidden = 128, kWindow = 20;
  if (tokens <= kHidden + kWindow) return;
  const FlashRuns runs{.window = kWindow};
  const Outputs wanted = own(kernels(), of, runs);
  for (const at::Tensor& each : {of.k, of.v}) {
    each.narrow(1, 0, kHidden - 64).fill_(NAN);
  }
  const Outputs found = own(kernels(), of, runs);
  const auto behind = [&](const at::Tensor& x) {
    return x.narrow(1, kHidden, tokens - kHidden);
  };
  EXPECT_TRUE(at::equal(behind(found.out), behind(wanted.out)));
  EXPECT_TRUE(at::equal(behind(found.dq), behind(wanted.dq)));
  EXPECT_TRUE(at::equal(behind(found.dk), behind(wanted.dk)));
}

constexpr int64_t kWithMasks = 300;  // tokens at most: they are made one by one

FlashRuns with_dropout(bool is_causal, int64_t first_query, int64_t first_key) {
  Dropout dropout = dropout_named("blocks.0.attention.weights", 0.3, {5, 2, 6});
  dropout.first_head = 3;
  return {is_causal, dropout, first_query, first_key};
}

// With the mask written out; it errs as it does without.
TEST_P(FlashOf, DropsWhatItsMaskSays) {
  const Inputs of = inputs();
  if (of.q.size(1) > kWithMasks) return;
  const FlashRuns runs = with_dropout(true, 0, 0);
  expect_close(own(kernels(), of, runs), exact(of, runs), own(kernels(), of),
               exact(of));
}

TEST_P(FlashOf, DropsWithinItsWindow) {
  const Inputs of = inputs();
  if (of.q.size(1) > kWithMasks) return;
  for (const int64_t window : {1, 5, 70}) {
    FlashRuns runs = with_dropout(true, 0, 0);
    runs.window = window;
    expect_close(own(kernels(), of, runs), exact(of, runs), own(kernels(), of),
                 exact(of));
  }
}

// Runs that begin anywhere, of which each query sees all keys.
TEST_P(FlashOf, DropsFromAnyRunOfKeys) {
  Inputs of = inputs();
  if (of.q.size(1) > kWithMasks) return;
  const int64_t keys = (of.k.size(1) + 1) / 2;
  of.k = of.k.narrow(1, 0, keys), of.v = of.v.narrow(1, 0, keys);
  const FlashRuns plain{.is_causal = false};
  for (const int64_t first_key : {0, 64, 37}) {
    const FlashRuns runs = with_dropout(false, 75, first_key);
    expect_close(own(kernels(), of, runs), exact(of, runs),
                 own(kernels(), of, plain), exact(of, plain));
  }
}

INSTANTIATE_TEST_SUITE_P(Vectors, FlashOf, ::testing::ValuesIn(cases()),
                         [](const auto& info) {
                           const FlashShape& shape = info.param.shape;
                           return std::string(info.param.kernels->name) + "_" +
                                  c10::toString(info.param.type) + "_T" +
                                  std::to_string(shape.tokens) + "_E" +
                                  std::to_string(shape.width);
                         });

TEST(Flash, Gradients) {
  at::manual_seed(7);
  const Inputs of = random_inputs({2, 70, 4, 2, 6}, at::kDouble);
  for (const at::Tensor& each : {of.q, of.k, of.v}) each.requires_grad_();
  flash_attention(of.q, of.k, of.v).backward(of.gradient);
  const Outputs wanted =
      exact({of.q.detach(), of.k.detach(), of.v.detach(), of.gradient});
  EXPECT_LE(error_of(of.q.grad(), wanted.dq), 1e-13);
  EXPECT_LE(error_of(of.k.grad(), wanted.dk), 1e-13);
  EXPECT_LE(error_of(of.v.grad(), wanted.dv), 1e-13);
}

TEST(Flash, GradientsWithDropoutAndAWindow) {
  at::manual_seed(7);
  const Inputs of = random_inputs({2, 70, 4, 2, 6}, at::kDouble);
  FlashRuns runs = with_dropout(true, 0, 0);
  runs.window = 9;
  for (const at::Tensor& each : {of.q, of.k, of.v}) each.requires_grad_();
  flash_attention(of.q, of.k, of.v, runs.dropout, runs.window)
      .backward(of.gradient);
  const Outputs wanted =
      exact({of.q.detach(), of.k.detach(), of.v.detach(), of.gradient}, runs);
  EXPECT_LE(error_of(of.q.grad(), wanted.dq), 1e-13);
  EXPECT_LE(error_of(of.k.grad(), wanted.dk), 1e-13);
  EXPECT_LE(error_of(of.v.grad(), wanted.dv), 1e-13);
}

TEST(Flash, TakesNeitherOtherTypesNorElementsApart) {
  const at::Tensor x = at::randn({1, 4, 2, 8});
  EXPECT_TRUE(takes_flash(x, x, x));
  const at::Tensor byte = x.to(at::kByte), wide = x.to(at::kDouble);
  EXPECT_FALSE(takes_flash(byte, byte, byte));
  EXPECT_FALSE(takes_flash(x, x, wide));
  const at::Tensor apart = at::randn({1, 4, 8, 2}).transpose(2, 3);
  EXPECT_FALSE(takes_flash(apart, x, x));
}

}  // namespace
}  // namespace tessera::nn
