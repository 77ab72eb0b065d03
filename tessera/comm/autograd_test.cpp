#include "tessera/comm/autograd.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

struct Case {
  std::string name;
  std::function<at::Tensor(const at::Tensor&, Group&)> function;
  bool same_input = false;   // every rank holds the input whole
  bool same_output = false;  // every rank uses the output alike
  std::vector<int64_t> shape;
};

at::Tensor numbers(std::vector<int64_t> shape, int64_t seed) {
  const int64_t count = c10::multiply_integers(shape);
  return at::arange(count, at::kDouble)
      .mul(0.7)
      .add(seed * 1.3)
      .sin()
      .view(shape);
}

// The sum of what each rank makes of its output; of an output that all use
// alike, what one makes of it.
double total_loss(const Case& c, const at::Tensor& x, Group& group,
                  at::Tensor* local = nullptr) {
  const at::Tensor y = c.function(x, group);
  const int64_t user = c.same_output ? 0 : group.rank();
  const at::Tensor loss = (y * y * numbers(y.sizes().vec(), 5 + user)).sum();
  if (local) *local = loss;
  at::Tensor sum = loss.detach().clone();
  group.all_reduce(sum).wait();
  return sum.item<double>() / (c.same_output ? group.size() : 1);
}

void expect_numeric_gradient(const Case& c, Group& group) {
  const int64_t holder = c.same_input ? 0 : group.rank();
  at::Tensor x = numbers(c.shape, holder).set_requires_grad(true);
  at::Tensor loss;
  total_loss(c, x, group, &loss);
  loss.backward();
  constexpr double kStep = 1e-6;
  const int64_t holders = c.same_input ? 1 : group.size();
  for (int64_t of = 0; of < holders; ++of) {
    for (int64_t i = 0; i < x.numel(); ++i) {
      const auto moved = [&](double by) {
        at::Tensor copy = x.detach().clone();
        if (of == holder) copy.view(-1)[i] += by;
        return total_loss(c, copy, group);
      };
      const double slope = (moved(kStep) - moved(-kStep)) / (2 * kStep);
      if (of != holder) continue;
      EXPECT_NEAR(x.grad().view(-1)[i].item<double>(), slope, 1e-8)
          << c.name << ", rank " << group.rank() << ", element " << i;
    }
  }
}

std::vector<Case> cases(int64_t n) {
  std::vector<Case> all = {
      {"identity_with_all_reduce", identity_with_all_reduce, true, false, {4}},
      {"all_reduce_with_identity", all_reduce_with_identity, false, true, {4}},
      {"all_to_all",
       [](const at::Tensor& x, Group& g) { return all_to_all(x, g); },
       false,
       false,
       {2 * n, 2}}};
  for (int64_t dim : {0, 1, -1}) {
    const auto with_dim = [dim](auto function) {
      return [=](const at::Tensor& x, Group& g) { return function(x, dim, g); };
    };
    const std::vector<int64_t> piece = {2, 3};
    const std::vector<int64_t> whole = {2 * n, 3 * n};
    all.push_back({"all_gather_with_reduce_scatter",
                   with_dim(all_gather_with_reduce_scatter), false, false,
                   piece});
    all.push_back({"reduce_scatter_with_all_gather",
                   with_dim(reduce_scatter_with_all_gather), false, false,
                   whole});
    all.push_back({"all_gather_with_split",
                   [dim](const at::Tensor& x, Group& g) {
                     return all_gather_with_split(x, dim, g);
                   },
                   false, true, piece});
    all.push_back({"split_with_all_gather", with_dim(split_with_all_gather),
                   true, false, whole});
  }
  return all;
}

class AutogradTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(AutogradTest, GradientsAreTheNumericOnes) {
  run_threads(GetParam(), "shm", [](Communicator& communicator) {
    for (const Case& c : cases(communicator.world_size())) {
      expect_numeric_gradient(c, communicator.world());
    }
  });
}

// Rank r sends r + 1 rows to each: the backward sends them home.
TEST_P(AutogradTest, UnevenAllToAll) {
  run_threads(GetParam(), "shm", [](Communicator& communicator) {
    Group& world = communicator.world();
    const int64_t n = world.size();
    std::vector<int64_t> in(n, world.rank() + 1), out(n);
    std::iota(out.begin(), out.end(), 1);
    at::Tensor x = numbers({n * (world.rank() + 1), 2}, world.rank());
    x.set_requires_grad(true);
    at::Tensor y = all_to_all(x, world, out, in);
    EXPECT_EQ(y.size(0), n * (n + 1) / 2);
    (y * y).sum().backward();
    EXPECT_TRUE(at::allclose(x.grad(), 2 * x.detach(), 0, 1e-15));
  });
}

// As one call does it, though others come between, forward and backward.
TEST_P(AutogradTest, RowsTravelWhileOthersDo) {
  run_threads(GetParam(), "shm", [](Communicator& communicator) {
    Group& world = communicator.world();
    const int64_t n = world.size(), rows = n * (world.rank() + 1);
    const std::vector<int64_t> in(n, world.rank() + 1);
    std::vector<int64_t> out(n);
    std::iota(out.begin(), out.end(), 1);
    const auto run = [&](const auto& exchange) {
      at::Tensor x = numbers({rows, 2}, world.rank()).requires_grad_();
      const std::vector<at::Tensor> y = exchange(x * 2, x * 3);
      (y[0].sin() * y[1]).sum().backward();
      return std::vector<at::Tensor>{y[0].detach(), y[1].detach(), x.grad()};
    };
    const auto at_once = run([&](const at::Tensor& a, const at::Tensor& b) {
      return std::vector<at::Tensor>{all_to_all(a, world, out, in),
                                     all_to_all(b, world, out, in)};
    });
    const auto travelled = run([&](const at::Tensor& a, const at::Tensor& b) {
      const auto first = start_all_to_all(a, world, out, in);
      const auto second = start_all_to_all(b, world, out, in);
      return std::vector<at::Tensor>{finish_all_to_all(first),
                                     finish_all_to_all(second)};
    });
    for (size_t i = 0; i < at_once.size(); ++i) {
      EXPECT_TRUE(at::equal(travelled[i], at_once[i])) << i;
    }
  });
}

// 5 tokens over ranks: the last ones have fewer, or none.
TEST_P(AutogradTest, PiecesMayBeShorter) {
  run_threads(GetParam(), "shm", [](Communicator& communicator) {
    Group& world = communicator.world();
    for (const int64_t dim : {0, 1}) {
      const at::Tensor whole = numbers({5, 5, 2}, 1).requires_grad_();
      const at::Tensor weight = numbers({5, 5, 2}, 9);
      const at::Tensor piece = split_with_all_gather(whole, dim, world);
      EXPECT_EQ(piece.size(dim) == 0, world.rank() > 2);
      const at::Tensor y = all_gather_with_split(piece.sin(), dim, world, 5);
      EXPECT_TRUE(at::equal(y, whole.sin()));
      (y * weight).sum().backward();
      EXPECT_TRUE(at::allclose(whole.grad(), whole.cos() * weight, 0, 1e-15));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, AutogradTest, ::testing::Values(1, 2, 3, 4));

TEST(Autograd, RefusesADimThatDoesNotDivide) {
  run_threads(2, "shm", [](Communicator& communicator) {
    EXPECT_THROW(
        reduce_scatter_with_all_gather(at::ones({3}), 0, communicator.world()),
        c10::Error);
  });
}

// What a backward moves is not recorded, and would be lost in silence.
TEST(Autograd, SecondDerivativesAreRefused) {
  run_threads(2, "shm", [](Communicator& ranks) {
    const at::Tensor x = numbers({4, 3}, ranks.rank()).set_requires_grad(true);
    const at::Tensor y = all_to_all(x, ranks.world()).square().sum();
    EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true,
                                       /*create_graph=*/true),
                 Error);
  });
}

}  // namespace
}  // namespace tessera::comm
