// Where gradients lie, what becomes of those that were there, and how they are
// cut into buckets.
#include "tessera/comm/flat_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/comm/communicator.h"

namespace tessera::comm {
namespace {

at::Tensor parameter_of(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::ones(shape, dtype).requires_grad_();
}

TEST(FlatGradients, TakesOverTheValuesThatAreThere) {
  const auto a = parameter_of({2, 3}, at::kFloat);
  const auto b = parameter_of({4}, at::kFloat);
  (a * 3).sum().backward();
  const at::Tensor held = a.grad();
  FlatGradients gradients({a, b}, at::kFloat, /*extra=*/0, nullptr);
  EXPECT_TRUE(held.is_same(a.grad()));
  EXPECT_EQ(gradients.flat().sum().item<float>(), 18);
  ((a * 2).sum() + b.sum()).backward();
  EXPECT_EQ(gradients.view(0).sum().item<float>(), 30);
  EXPECT_EQ(gradients.view(1).sum().item<float>(), 4);
}

TEST(FlatGradients, ZeroPutsBackWhatWasTakenAway) {
  const auto a = parameter_of({5}, at::kBFloat16);
  FlatGradients gradients({a}, at::kFloat, /*extra=*/0, nullptr);
  a.mutable_grad() = at::Tensor();
  EXPECT_FALSE(gradients.is_in_place(0));
  (a * 2).sum().backward();
  EXPECT_FALSE(gradients.is_in_place(0));
  gradients.zero();
  EXPECT_TRUE(gradients.is_in_place(0));
  (a * 2).sum().backward();
  EXPECT_EQ(a.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(gradients.flat().sum().item<float>(), 10);
}

TEST(FlatGradients, BucketsChangeNoSumAndAreOfAtMostSoManyBytes) {
  run_threads(2, "shm", [](Communicator& ranks) {
    Group& world = ranks.world();
    for (const int64_t bytes : {0, 1, 40, 1000}) {
      const auto a = parameter_of({5, 5}, at::kFloat);
      FlatGradients gradients({a}, at::kFloat, /*extra=*/1, &world);
      (a * static_cast<double>(world.rank() + 1)).sum().backward();
      gradients.extra().fill_(1);
      world.reset_stats();
      gradients.begin_all_reduce(world, Mode::kAsync, bytes);
      gradients.await_all_reduce();
      EXPECT_TRUE(at::equal(a.grad(), at::full({5, 5}, 3.0F)));
      EXPECT_EQ(gradients.extra().item<float>(), 2);
      const int64_t all = gradients.flat().numel();
      const int64_t most = elements_of_bucket(bytes, all, /*item=*/4);
      EXPECT_EQ(world.stats().at(0).calls, (all + most - 1) / most);
    }
  });
}

TEST(CutIntoBuckets, ByTypeAndBytesInTheOrderThatIsAskedFor) {
  const std::vector<at::Tensor> parameters = {
      parameter_of({10}, at::kFloat), parameter_of({2}, at::kFloat),
      parameter_of({3}, at::kDouble), parameter_of({1}, at::kFloat)};
  const auto cut = [&](int64_t bytes) {
    return cut_into_buckets(
        parameters, {3, 1, 0, 2},
        [](const at::Tensor& each) { return each.scalar_type(); }, bytes);
  };
  using Buckets = std::vector<std::vector<size_t>>;
  EXPECT_EQ(cut(1000), (Buckets{{3, 1, 0}, {2}}));
  EXPECT_EQ(cut(12), (Buckets{{3, 1}, {0}, {2}}));
  EXPECT_EQ(cut(0), (Buckets{{3}, {1}, {0}, {2}}));
}

}  // namespace
}  // namespace tessera::comm
