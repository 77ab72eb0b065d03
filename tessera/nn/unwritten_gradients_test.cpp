#include "tessera/nn/unwritten_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <limits>
#include <optional>

#include "tessera/nn/grouped_linear.h"
#include "tessera/nn/matmul.h"
#include "tessera/nn/weight_queue.h"

namespace tessera::nn {
namespace {

constexpr double kJunk = std::numeric_limits<double>::quiet_NaN();

using Tensors = std::vector<at::Tensor>;
using Layer = std::function<at::Tensor(const Tensors& of)>;

// Two backwards into one buffer that holds junk, or into zeros.
Tensors gradients_of(const Layer& layer, const Tensors& parameters,
                     at::ScalarType type, bool unwritten, bool in_parts) {
  int64_t numel = 0;
  for (const auto& each : parameters) numel += each.numel();
  const at::Tensor flat =
      at::full({numel}, unwritten ? kJunk : 0.0, at::TensorOptions(type));
  Tensors gradients;
  int64_t begin = 0;
  for (const auto& each : parameters) {
    gradients.push_back(flat.narrow(0, begin, each.numel()).view_as(each));
    each.mutable_grad() = gradients.back().variable_data();
    begin += each.numel();
  }
  std::optional<UnwrittenGradients> all;
  if (unwritten) all.emplace(parameters, gradients).begin(flat);
  for (int i = 0; i < 2; ++i) {
    const auto queue = c10::make_intrusive<WeightQueue>();
    at::Tensor y;
    {
      const WeightQueue::Scope scope(queue);
      y = layer(parameters);
    }
    const at::Tensor dy = at::ones_like(y);
    if (in_parts) {
      queue->put_off({y}, {dy}, parameters[0], parameters);
      queue->run();
    } else {
      torch::autograd::backward({y}, {dy});
    }
  }
  if (all) all->complete();
  return gradients;
}

void expect_as_from_zeros(const Layer& layer, const Tensors& parameters,
                          at::ScalarType type = at::kDouble) {
  for (const bool in_parts : {false, true}) {
    const Tensors found =
        gradients_of(layer, parameters, type, /*unwritten=*/true, in_parts);
    const Tensors wanted =
        gradients_of(layer, parameters, type, /*unwritten=*/false, in_parts);
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], wanted[i]))
          << "gradient " << i << (in_parts ? " in parts" : "");
    }
  }
}

at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType type = at::kDouble) {
  return at::randn(sizes, type).requires_grad_();
}

TEST(UnwrittenGradients, ProductsWriteAndThenAdd) {
  const at::Tensor x = at::randn({70, 64}, at::kDouble);
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor in = x.to(type);
    expect_as_from_zeros(
        [&](const Tensors& of) {
          return linear_product(linear_product(in, of[0], of[1]).tanh(), of[2]);
        },
        {leaf({64, 64}, type), leaf({64}, type), leaf({3, 64}, type)},
        type == at::kDouble ? at::kDouble : at::kFloat);
  }
}

// LibTorch's accumulation first, the product first, or nobody at all.
TEST(UnwrittenGradients, WhoeverAddsFindsZeros) {
  const at::Tensor x = at::randn({5, 4}, at::kDouble);
  expect_as_from_zeros(
      [&](const Tensors& of) {
        const at::Tensor both = linear_product(x, of[0]) + at::mm(x, of[0].t());
        return at::mm(linear_product(both.sin(), of[1]), of[1]) * of[2];
      },
      {leaf({4, 4}), leaf({4, 4}), leaf({1, 4}), leaf({3, 3})});
}

TEST(UnwrittenGradients, TablesAndExpertsWithoutRows) {
  const at::Tensor ids = at::tensor({2, 0, 2}, at::kLong);
  expect_as_from_zeros(
      [&](const Tensors& of) {
        const at::Tensor rows = table_rows(of[0], ids);
        return grouped_product(rows.sin(), of[1], RowGroups({0, 2, 0, 1}));
      },
      {leaf({6, 4}), leaf({4, 3, 4})});
}

// Whoever asks for the gradient of the rows alone.
TEST(UnwrittenGradients, ExpertsThatNobodyAsksForStayUnwritten) {
  const at::Tensor rows = leaf({3, 4}), w = leaf({3, 5, 4});
  const at::Tensor memory = at::full({3, 5, 4}, kJunk, at::kDouble);
  UnwrittenGradients all({w}, {memory});
  all.begin(memory);
  w.mutable_grad() = memory;
  const at::Tensor y = grouped_product(rows, w, RowGroups({1, 0, 2}));
  const at::Tensor found = torch::autograd::grad({y.sum()}, {rows})[0];
  EXPECT_TRUE(at::isfinite(found).all().item<bool>());
  EXPECT_TRUE(at::isnan(memory).all().item<bool>());
  EXPECT_TRUE(take_unwritten(w));
}

// As of several steps' gradients, one of which is in use.
TEST(UnwrittenGradients, ThoseOfAnotherBufferStay) {
  const at::Tensor w = leaf({2, 3}), x = at::randn({4, 3}, at::kDouble);
  const auto junk = [&] { return at::full({2, 3}, kJunk, at::kDouble); };
  const at::Tensor one = junk(), other = junk();
  UnwrittenGradients of_one({w}, {one}), of_other({w}, {other});
  of_one.begin(one);
  of_other.begin(other);
  w.mutable_grad() = one;
  const at::Tensor y = linear_product(x, w);
  torch::autograd::backward({y}, {at::ones_like(y)});
  EXPECT_TRUE(at::isfinite(one).all().item<bool>());
  EXPECT_TRUE(at::isnan(other).all().item<bool>());
  of_other.complete();
  EXPECT_TRUE(other.eq(0).all().item<bool>());
}

// As where gradients live for a backward, and the next one's have the memory
// that the last one's were freed from.
TEST(UnwrittenGradients, MemoryIsThatOfTheLastThatBegan) {
  const at::Tensor w = leaf({2, 3}), x = at::randn({4, 3}, at::kDouble);
  const at::Tensor memory = at::full({2, 3}, kJunk, at::kDouble);
  UnwrittenGradients of_one({w}, {memory}), of_other({w}, {memory});
  w.mutable_grad() = memory;
  for (UnwrittenGradients* each : {&of_one, &of_other, &of_one}) {
    memory.fill_(kJunk);
    each->begin(memory);
    const at::Tensor y = linear_product(x, w);
    torch::autograd::backward({y}, {at::ones_like(y)});
    EXPECT_TRUE(at::isfinite(memory).all().item<bool>());
  }
}

// Vectors are few numbers, for which a product would be no gain.
TEST(UnwrittenGradients, VectorsAreFilledAtOnce) {
  const at::Tensor w = leaf({2, 3}), b = leaf({2});
  const at::Tensor all = at::full({8}, kJunk, at::kDouble);
  const at::Tensor of_w = all.narrow(0, 0, 6).view({2, 3});
  const at::Tensor of_b = all.narrow(0, 6, 2);
  UnwrittenGradients both({w, b}, {of_w, of_b});
  both.begin(all);
  EXPECT_TRUE(of_b.eq(0).all().item<bool>());
  both.complete();
  EXPECT_TRUE(all.eq(0).all().item<bool>());
}

}  // namespace
}  // namespace tessera::nn
