#include "tessera/wrappers/sync_batch_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/distributed_data_parallel.h"

namespace tessera {
namespace {

namespace nn = torch::nn;

constexpr int64_t kChannels = 5;

nn::BatchNormOptions options_of(bool affine, std::optional<double> momentum) {
  return nn::BatchNormOptions(kChannels).affine(affine).momentum(momentum);
}

// Far from 0, where sums of squares would lose what matters.
at::Tensor batch_of(int64_t step, int64_t rows, at::IntArrayRef behind) {
  std::vector<int64_t> sizes{rows, kChannels};
  sizes.insert(sizes.end(), behind.begin(), behind.end());
  return at::arange(c10::multiply_integers(sizes), at::kDouble)
      .mul(0.37 + 0.1 * static_cast<double>(step))
      .sin()
      .add(100)
      .view(sizes);
}

struct Trained {
  at::Tensor output, input_gradient, weight_gradient, bias_gradient;
  at::Tensor mean, variance;
};

template <typename Norm>
void move_parameters(Norm& norm) {
  const at::NoGradGuard no_grad;
  norm->to(at::kDouble);
  if (!norm->options.affine()) return;
  norm->weight.copy_(at::arange(kChannels, at::kDouble).cos());
  norm->bias.copy_(at::arange(kChannels, at::kDouble).sin());
}

at::Tensor loss_of(const at::Tensor& y) { return y.exp().sum(); }

template <typename Norm>
Trained trained(Norm& norm, const std::function<at::Tensor(int64_t)>& batch) {
  Trained found;
  for (int64_t step = 0; step < 3; ++step) {
    norm->zero_grad();
    const at::Tensor x = batch(step).clone().requires_grad_();
    found.output = norm->forward(x);
    loss_of(found.output).backward();
    found.input_gradient = x.grad();
  }
  if (norm->options.affine()) {
    found.weight_gradient = norm->weight.grad();
    found.bias_gradient = norm->bias.grad();
  }
  found.mean = norm->running_mean;
  found.variance = norm->running_var;
  return found;
}

void expect_close(const at::Tensor& found, const at::Tensor& wanted) {
  EXPECT_TRUE(at::allclose(found, wanted, 1e-10, 1e-11));
}

// Ranks of 1, 2, ... rows beside BatchNorm over all of them.
void expect_as_on_one(int64_t ranks, const nn::BatchNormOptions& options,
                      at::IntArrayRef behind) {
  const int64_t rows = ranks * (ranks + 1) / 2 + 1;
  nn::BatchNorm1d whole1(options);
  nn::BatchNorm2d whole2(options);
  move_parameters(whole1);
  move_parameters(whole2);
  const auto all = [&](int64_t step) { return batch_of(step, rows, behind); };
  const Trained wanted =
      behind.size() == 2 ? trained(whole2, all) : trained(whole1, all);
  comm::run_threads(ranks, "shm", [&](comm::Communicator& communicator) {
    const int64_t rank = communicator.rank();
    const int64_t start = rank * (rank + 1) / 2;
    const int64_t mine = rank + 1 + (rank == ranks - 1 ? 1 : 0);
    SyncBatchNorm norm(options, communicator.world());
    move_parameters(norm);
    const Trained found = trained(
        norm, [&](int64_t step) { return all(step).narrow(0, start, mine); });
    expect_close(found.output, wanted.output.narrow(0, start, mine));
    expect_close(found.input_gradient,
                 wanted.input_gradient.narrow(0, start, mine));
    expect_close(found.mean, wanted.mean);
    expect_close(found.variance, wanted.variance);
    if (options.affine()) {
      for (at::Tensor each : {found.weight_gradient, found.bias_gradient}) {
        communicator.world().all_reduce(each).synchronize();
      }
      expect_close(found.weight_gradient, wanted.weight_gradient);
      expect_close(found.bias_gradient, wanted.bias_gradient);
    }
    const at::Tensor x = all(7).narrow(0, start, mine);
    norm->eval();
    EXPECT_EQ(norm->forward(x).sizes(), x.sizes());
  });
}

TEST(SyncBatchNorm, IsBatchNormOfAllRanksTogether) {
  for (const int64_t ranks : {1, 2, 3}) {
    expect_as_on_one(ranks, options_of(true, 0.1), {4, 3});
    expect_as_on_one(ranks, options_of(false, 0.1), {6});
    expect_as_on_one(ranks, options_of(true, std::nullopt), {});
  }
}

TEST(SyncBatchNorm, RefusesWhatHasNoStatistics) {
  comm::run_threads(1, "shm", [](comm::Communicator& ranks) {
    SyncBatchNorm norm(nn::BatchNormOptions(kChannels), ranks.world());
    EXPECT_THROW(norm->forward(at::ones({3, 4})), Error);
    EXPECT_THROW(norm->forward(at::ones({0, kChannels})), Error);
    EXPECT_THROW(norm->forward(at::ones({kChannels})), Error);
  });
}

TEST(SyncBatchNorm, WantsDataOfEveryRank) {
  comm::run_threads(2, "shm", [](comm::Communicator& ranks) {
    const nn::Sequential net(
        nn::Linear(2, kChannels),
        SyncBatchNorm(nn::BatchNormOptions(kChannels), ranks.world()));
    DistributedDataParallel model(net.ptr(), ranks.world());
    EXPECT_THROW(model.join(), Error);
  });
}

}  // namespace
}  // namespace tessera
