// DDP against one rank, in double: gradients, weights, accumulation, buckets,
// ended ranks, unused parameters, buffers.
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <functional>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/distributed_data_parallel.h"

namespace tessera::wrappers {
namespace {

struct NetImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr}, tied{nullptr}, unused{nullptr};

  explicit NetImpl(at::ScalarType dtype, uint64_t seed = 1) {
    a = register_module("a", torch::nn::Linear(6, 13));
    b = register_module("b", torch::nn::Linear(13, 13));
    tied = register_module("tied", torch::nn::Linear(13, 6));
    unused = register_module("unused", torch::nn::Linear(3, 2));
    to(dtype);
    at::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(seed);
    for (auto& p : parameters()) p.normal_(0, 0.4, generator);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto h = at::tanh(a->forward(x));
    h = at::tanh(b->forward(h)) + h;
    h = tied->forward(h);
    return at::linear(h, tied->weight.t());  // used twice
  }
};
TORCH_MODULE(Net);

at::Tensor data_of(int64_t rows, at::ScalarType dtype) {
  return at::arange(rows * 6, at::TensorOptions(dtype))
      .mul(0.37)
      .sin()
      .view({rows, 6});
}

std::vector<at::Tensor> values_of(torch::nn::Module& module) {
  std::vector<at::Tensor> values;
  for (auto& p : module.parameters()) values.push_back(p.detach().clone());
  return values;
}

constexpr int64_t kRows = 24;  // divides by 2, 3, 4
constexpr int kSteps = 8;

// What one rank makes of the whole batch.
std::vector<at::Tensor> one_rank(at::ScalarType dtype) {
  Net net(dtype);
  net->unused->weight.requires_grad_(false);
  net->unused->bias.requires_grad_(false);
  torch::optim::AdamW optimizer(net->parameters(),
                                torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    net->forward(data_of(kRows, dtype) + step).pow(2).mean().backward();
    optimizer.step();
  }
  return values_of(*net);
}

struct Case {
  std::string backend;
  int64_t world;
  int64_t microbatches;
  DistributedDataParallelOptions options = {};
  bool own_backward = false;  // the loss's, instead of the model's
};

std::vector<std::vector<at::Tensor>> many_ranks(const Case& c,
                                                at::ScalarType dtype) {
  std::vector<std::vector<at::Tensor>> results(c.world);
  comm::run_threads(c.world, c.backend, [&](comm::Communicator& communicator) {
    const int64_t rank = communicator.rank();
    Net net(dtype, /*seed=*/1 + rank);  // rank 0's weights win
    net->unused->weight.requires_grad_(false);
    net->unused->bias.requires_grad_(false);
    DistributedDataParallel ddp(net, communicator.world(), c.options);
    torch::optim::AdamW optimizer(net->parameters(),
                                  torch::optim::AdamWOptions(1e-2));
    const int64_t share = kRows / c.world, micro = share / c.microbatches;
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor mine =
          (data_of(kRows, dtype) + step).narrow(0, rank * share, share);
      for (int64_t m = 0; m < c.microbatches; ++m) {
        auto loss =
            ddp.forward(mine.narrow(0, m * micro, micro)).pow(2).mean() /
            c.microbatches;
        if (m + 1 < c.microbatches) {
          ddp.accumulate(loss);
        } else {
          c.own_backward ? loss.backward() : ddp.backward(loss);
        }
      }
      optimizer.step();
    }
    results[rank] = values_of(*net);
  });
  return results;
}

double largest_difference(const std::vector<at::Tensor>& a,
                          const std::vector<at::Tensor>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double norm = b[i].norm().item<double>();
    worst = std::max(worst, (a[i] - b[i]).norm().item<double>() / norm);
  }
  return worst;
}

bool same_bits(const std::vector<at::Tensor>& a,
               const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return true;
}

TEST(DistributedDataParallel, EqualsOneRank) {
  for (auto [dtype, bound] :
       {std::pair{at::kDouble, 1e-10}, {at::kFloat, 1e-4}}) {
    const auto reference = one_rank(dtype);
    for (const std::string backend : {"shm", "gloo"}) {
      for (int64_t world : {1, 2, 3, 4}) {
        for (int64_t micro : {1, 3}) {
          if ((kRows / world) % micro != 0) continue;
          const auto all =
              many_ranks({backend, world, micro, {.bucket_bytes = 512}}, dtype);
          for (const auto& one : all) {
            EXPECT_LT(largest_difference(one, reference), bound)
                << backend << " world " << world << " micro-batches " << micro;
            EXPECT_TRUE(same_bits(one, all[0]));
          }
        }
      }
    }
  }
}

TEST(DistributedDataParallel, BucketsAndOverlapChangeNoBitOnShm) {
  const auto reference = many_ranks({"shm", 3, 2, {}}, at::kFloat)[0];
  for (int64_t bucket_bytes : {1, 300, 700, 2000, 100000}) {
    for (bool overlap : {true, false}) {
      EXPECT_TRUE(same_bits(
          many_ranks(
              {"shm", 3, 2, {.bucket_bytes = bucket_bytes, .overlap = overlap}},
              at::kFloat)[1],
          reference))
          << bucket_bytes << " overlap " << overlap;
    }
  }
}

TEST(DistributedDataParallel, TheLossesOwnBackwardReducesTheSame) {
  for (const std::string backend : {"shm", "gloo"}) {
    for (int64_t micro : {1, 2}) {
      for (bool overlap : {true, false}) {
        Case c{backend, 2, micro, {.bucket_bytes = 512, .overlap = overlap}};
        const auto expected = many_ranks(c, at::kFloat);
        c.own_backward = true;
        const auto all = many_ranks(c, at::kFloat);
        for (const auto& one : all) EXPECT_TRUE(same_bits(one, expected[0]));
      }
    }
  }
}

// The order of zero_grad() and forward() is the user's, and whether gradients
// are zeroed or taken away; without zero_grad() the mean is added.
TEST(DistributedDataParallel, TheLossesOwnBackwardAddsToGradients) {
  enum class Zero { kBefore, kAfter, kInPlace, kNever };
  for (Zero when :
       {Zero::kBefore, Zero::kAfter, Zero::kInPlace, Zero::kNever}) {
    comm::run_threads(2, "shm", [&](comm::Communicator& communicator) {
      torch::nn::Linear net(6, 3);
      net->to(at::kDouble);
      DistributedDataParallel ddp(net, communicator.world());
      torch::optim::SGD optimizer(net->parameters(), 0.01);
      for (int step = 1; step <= 3; ++step) {
        const at::Tensor x = at::full({1, 6}, communicator.rank() + step,
                                      at::TensorOptions(at::kDouble));
        if (when == Zero::kBefore) optimizer.zero_grad();
        if (when == Zero::kInPlace) optimizer.zero_grad(/*set_to_none=*/false);
        const at::Tensor loss = ddp.forward(x).sum();
        if (when == Zero::kAfter) optimizer.zero_grad();
        loss.backward();
        // The mean of step and step + 1; the sum of those so far.
        const double expected =
            when == Zero::kNever ? step * (step + 2) / 2.0 : step + 0.5;
        EXPECT_TRUE(at::allclose(net->weight.grad(),
                                 at::full({3, 6}, expected, at::kDouble)))
            << static_cast<int>(when) << " step " << step;
      }
    });
  }
}

// A message of each rank; empty where nothing was refused.
std::vector<std::string> refusals_of(
    const std::function<void(comm::Communicator&)>& train) {
  std::vector<std::string> messages(2);
  comm::run_threads(2, "shm", [&](comm::Communicator& communicator) {
    try {
      train(communicator);
    } catch (const Error& error) {
      messages[communicator.rank()] = error.what();
    }
  });
  return messages;
}

TEST(DistributedDataParallel, NamesParametersWithoutGradientOnEveryRank) {
  for (bool own_backward : {false, true}) {
    const auto messages = refusals_of([&](comm::Communicator& communicator) {
      Net net(at::kDouble);
      DistributedDataParallel ddp(net, communicator.world());
      const auto loss = ddp.forward(data_of(4, at::kDouble)).sum();
      own_backward ? loss.backward() : ddp.backward(loss);
    });
    for (const auto& message : messages) {
      EXPECT_THAT(message, ::testing::HasSubstr("unused.weight, unused.bias"));
    }
  }
}

struct Fails : torch::autograd::Function<Fails> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) {
    return x.clone();
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext*, const torch::autograd::tensor_list&) {
    TS_CHECK(false, "boom");
  }
};

TEST(DistributedDataParallel, RefusesAModelThatWasNotReduced) {
  const auto failed = refusals_of([](comm::Communicator& communicator) {
    torch::nn::Linear first(6, 6), second(6, 6);
    torch::nn::Sequential net(first, second);
    DistributedDataParallel ddp(net, communicator.world());
    const auto x = data_of(4, at::kFloat);
    auto hidden = Fails::apply(first->forward(x));
    EXPECT_THROW(second->forward(hidden).sum().backward(), Error);
    ddp.forward(x);
  });
  const auto moved = refusals_of([](comm::Communicator& communicator) {
    torch::nn::Linear net(6, 6);
    DistributedDataParallel ddp(net, communicator.world());
    net->to(at::kDouble);
    ddp.forward(data_of(4, at::kDouble));
  });
  const auto recorded = refusals_of([](comm::Communicator& communicator) {
    torch::nn::Linear net(6, 6);
    DistributedDataParallel ddp(net, communicator.world());
    // Such a gradient and its parameter hold each other.
    const auto ends = c10::make_scope_exit([&] { net->zero_grad(); });
    ddp.forward(data_of(4, at::kFloat))
        .pow(2)
        .sum()
        .backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(failed[rank], ::testing::HasSubstr("did not end"));
    EXPECT_THAT(moved[rank], ::testing::HasSubstr("memory, dtype or device"));
    EXPECT_THAT(recorded[rank], ::testing::HasSubstr("create_graph"));
  }
}

// Rank 0 alone looks at its model between two steps.
TEST(DistributedDataParallel, AnEvaluationOnOneRankHangsNobody) {
  comm::run_threads(2, "shm", [&](comm::Communicator& communicator) {
    torch::nn::BatchNorm1d norm(6);
    DistributedDataParallel ddp(norm.ptr(), communicator.world());
    const auto x = data_of(8, at::kFloat);
    for (int step = 0; step < 2; ++step) {
      ddp.backward(ddp.forward(x).pow(3).sum());
      if (communicator.rank() > 0) continue;
      const at::NoGradGuard no_grad;
      norm->eval();
      ddp.forward(x);
      norm->train();
    }
  });
}

TEST(DistributedDataParallel, AParameterUnusedOnOneRankHangsNobody) {
  for (bool allow : {false, true}) {
    std::vector<std::string> messages(3);
    std::vector<at::Tensor> gradients(3);
    comm::run_threads(3, "shm", [&](comm::Communicator& communicator) {
      const int64_t rank = communicator.rank();
      Net net(at::kDouble);
      DistributedDataParallel ddp(net, communicator.world(),
                                  {.bucket_bytes = 64, .allow_unused = allow});
      auto loss = ddp.forward(data_of(4, at::kDouble)).sum();
      if (rank != 1)
        loss = loss + net->unused->forward(at::ones({1, 3}, at::kDouble)).sum();
      try {
        ddp.backward(loss);
        gradients[rank] = net->unused->bias.grad().clone();
      } catch (const Error& error) {
        messages[rank] = error.what();
      }
    });
    for (int64_t rank = 0; rank < 3; ++rank) {
      if (allow) {
        // The mean over three ranks, of which one gave zero.
        EXPECT_TRUE(
            at::allclose(gradients[rank], at::full({2}, 2.0 / 3, at::kDouble)));
      } else {
        EXPECT_THAT(messages[rank],
                    ::testing::HasSubstr(rank == 1 ? "unused.bias"
                                                   : "missing on other ranks"));
      }
    }
  }
}

int64_t reductions_of(const comm::Group& group) {
  int64_t calls = 0;
  for (const auto& verb : group.stats()) {
    if (verb.verb == "all_reduce") calls += verb.calls;
  }
  return calls;
}

struct RowsImpl : torch::nn::Module {
  at::Tensor rows;
  explicit RowsImpl(const at::Tensor& of) {
    rows = register_parameter("rows", of);
  }
};
TORCH_MODULE(Rows);

struct TiedImpl : torch::nn::Module {
  Rows first{nullptr}, second{nullptr};
  TiedImpl() {
    const auto rows = at::ones({6}, at::kDouble);
    first = register_module("first", Rows(rows));
    second = register_module("second", Rows(rows));
  }
  at::Tensor forward(const at::Tensor& x) {
    return (x * first->rows).sum() + 2 * (x * second->rows).sum();
  }
};
TORCH_MODULE(Tied);

// One tensor under two names is one parameter, and goes over the ranks once.
TEST(DistributedDataParallel, ReducesATiedParameterOnce) {
  comm::run_threads(2, "shm", [](comm::Communicator& communicator) {
    auto& world = communicator.world();
    Tied net;
    DistributedDataParallel ddp(net, world, {.bucket_bytes = 1});
    const auto x = at::full({6}, 1.0 + communicator.rank(), at::kDouble);
    for (int step = 0; step < 3; ++step) {
      const int64_t before = reductions_of(world);
      ddp.backward(ddp.forward(x));
      EXPECT_EQ(reductions_of(world) - before, 1);
      EXPECT_TRUE(
          at::equal(net->first->rows.grad(), at::full({6}, 4.5, at::kDouble)));
    }
  });
}

// Of one shape, so that their gradients would be summed with each other.
TEST(DistributedDataParallel, RefusesOtherFrozenParametersOnAnotherRank) {
  const auto messages = refusals_of([](comm::Communicator& communicator) {
    torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
    net->parameters()[2 * communicator.rank()].requires_grad_(false);
    DistributedDataParallel ddp(net, communicator.world());
  });
  for (const auto& message : messages) {
    EXPECT_THAT(message, ::testing::HasSubstr("frozen (requires_grad)"));
  }
}

// On rank 1, as where a batch has nothing to learn from.
TEST(DistributedDataParallel, ALossThatRequiresNoGradientHangsNobody) {
  for (const bool allow : {false, true}) {
    std::vector<at::Tensor> gradients(2);
    const auto messages = refusals_of([&](comm::Communicator& communicator) {
      const int64_t rank = communicator.rank();
      torch::nn::Linear net(6, 3);
      DistributedDataParallel ddp(net, communicator.world(),
                                  {.allow_unused = allow});
      const auto loss = [&] {
        const auto own = ddp.forward(at::ones({1, 6})).sum();
        return rank == 0 ? own : at::zeros({});
      };
      ddp.backward(loss());
      ddp.accumulate(loss());
      ddp.backward(loss());
      gradients[rank] = net->weight.grad().clone();
    });
    for (int64_t rank = 0; rank < 2; ++rank) {
      if (allow) {
        EXPECT_EQ(messages[rank], "");
        EXPECT_TRUE(at::equal(gradients[rank], at::ones({3, 6})));
      } else {
        EXPECT_THAT(messages[rank],
                    ::testing::HasSubstr(rank == 0 ? "missing on other ranks"
                                                   : "weight, bias"));
      }
    }
  }
}

// Ranks with 1, 2 and 4 batches: each step is the mean over those that still
// have data, as one rank would compute it.
TEST(DistributedDataParallel, RanksWhoseDataEndsEarly) {
  const std::vector<int> batches = {1, 2, 4};
  auto batch_of = [](int64_t rank, int step) {
    return data_of(4, at::kDouble) + static_cast<double>(10 * rank + step);
  };
  Net reference(at::kDouble);
  torch::optim::SGD sgd(reference->parameters(), 0.01);
  for (int step = 0; step < 4; ++step) {
    sgd.zero_grad();
    int active = 0;
    for (int64_t rank = 0; rank < 3; ++rank) active += batches[rank] > step;
    for (int64_t rank = 0; rank < 3; ++rank) {
      if (batches[rank] <= step) continue;
      (reference->forward(batch_of(rank, step)).pow(2).mean() / active)
          .backward();
    }
    sgd.step();
  }
  std::vector<at::Tensor> last;
  comm::run_threads(3, "shm", [&](comm::Communicator& communicator) {
    const int64_t rank = communicator.rank();
    Net net(at::kDouble);
    DistributedDataParallel ddp(net, communicator.world(),
                                {.bucket_bytes = 512, .allow_unused = true});
    torch::optim::SGD optimizer(net->parameters(), 0.01);
    for (int step = 0; step < batches[rank]; ++step) {
      ddp.backward(ddp.forward(batch_of(rank, step)).pow(2).mean());
      optimizer.step();
    }
    ddp.join();
    if (rank == 2) last = values_of(*net);
  });
  auto expected = values_of(*reference);
  // `unused` has no gradient in the reference and a zero one here.
  EXPECT_LT(largest_difference(last, expected), 1e-12);
}

TEST(DistributedDataParallel, BroadcastsBuffersOnceAStep) {
  std::vector<at::Tensor> means(2);
  comm::run_threads(2, "shm", [&](comm::Communicator& communicator) {
    torch::nn::BatchNorm1d norm(6);
    norm->to(at::kDouble);
    DistributedDataParallel ddp(norm.ptr(), communicator.world());
    for (int step = 0; step < 3; ++step) {
      auto x =
          data_of(8, at::kDouble) + static_cast<double>(communicator.rank());
      ddp.accumulate(ddp.forward(x).pow(3).sum());
      ddp.backward(ddp.forward(x).pow(3).sum());
    }
    norm->train();
    ddp.forward(data_of(8, at::kDouble));
    means[communicator.rank()] = norm->running_mean.clone();
  });
  EXPECT_TRUE(at::equal(means[0], means[1]));
}

TEST(DistributedDataParallel, RefusesAnotherModuleOnAnotherRank) {
  std::vector<std::string> messages(2);
  comm::run_threads(2, "shm", [&](comm::Communicator& communicator) {
    torch::nn::Linear linear(4, 3 + communicator.rank());
    try {
      DistributedDataParallel ddp(linear, communicator.world());
    } catch (const Error& error) {
      messages[communicator.rank()] = error.what();
    }
  });
  for (const auto& message : messages) {
    EXPECT_THAT(message, ::testing::HasSubstr("is another one"));
  }
}

TEST(DistributedDataParallel, ReducesOncePerStepHoweverManyMicrobatches) {
  comm::run_threads(2, "shm", [&](comm::Communicator& communicator) {
    Net net(at::kFloat);
    DistributedDataParallel ddp(
        net, communicator.world(),
        {.bucket_bytes = 1 << 20, .allow_unused = true});
    auto step = [&](int micro) {
      for (int m = 1; m < micro; ++m)
        ddp.accumulate(ddp.forward(data_of(4, at::kFloat)).sum());
      ddp.backward(ddp.forward(data_of(4, at::kFloat)).sum());
    };
    step(1);
    auto& world = communicator.world();
    for (int micro : {1, 2, 8}) {
      const int64_t before = reductions_of(world);
      step(micro);
      EXPECT_EQ(reductions_of(world) - before, 1);  // in one bucket
    }
  });
}

}  // namespace
}  // namespace tessera::wrappers
