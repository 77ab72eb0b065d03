#include "tessera/parallel/tensor/vocabulary_loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/ignore_index.h"
#include "tessera/mesh/layout.h"

namespace tessera::parallel::tensor {
namespace {

struct Computed {
  double sum, weight;
  at::Tensor gradient;
};

template <typename Loss>
Computed compute(const at::Tensor& logits, Loss loss) {
  const at::Tensor leaf = logits.detach().clone().requires_grad_();
  const nn::LossSum found = loss(leaf.clone());
  torch::autograd::backward({found.sum * 0.5}, {});
  return {found.sum.template item<double>(),
          found.weight.template item<double>(), leaf.grad()};
}

// Over any number of ranks, also where some hold no entry: the whole sum on
// each, and the gradient of its own logits.
TEST(VocabularyShard, EqualsTheWholeLoss) {
  constexpr int64_t kVocabulary = 5;
  const auto generator = at::detail::createCPUGenerator(3);
  const at::Tensor logits = at::randn({2, 3, kVocabulary}, generator,
                                      at::TensorOptions().dtype(at::kDouble));
  const at::Tensor targets =
      at::tensor({4L, 0L, kIgnoreIndex, 2L, 3L, 1L}).view({2, 3});
  const Computed whole = compute(logits, [&](const at::Tensor& own) {
    return nn::cross_entropy(own, targets);
  });
  for (const int64_t ranks : {1, 2, 3, 4, 7}) {
    comm::run_threads(ranks, "shm", [&](comm::Communicator& communicator) {
      comm::Group& group = communicator.world();
      const auto range = mesh::chunk_of(kVocabulary, ranks, group.rank());
      const auto mine = [&](const at::Tensor& x) {
        return x.narrow(2, range.begin, range.size());
      };
      const Computed part = compute(mine(logits), [&](const at::Tensor& own) {
        return nn::cross_entropy(
            own, targets, vocabulary_loss({range.begin, kVocabulary, &group}));
      });
      EXPECT_NEAR(part.sum, whole.sum, 1e-13);
      EXPECT_EQ(part.weight, whole.weight);
      EXPECT_TRUE(at::allclose(part.gradient, mine(whole.gradient), 1e-13));
    });
  }
}

// Rows enough for several lots, of which each is two sums over the ranks.
TEST(VocabularyShard, UnderAHeadInLotsEqualsTheWholeLoss) {
  constexpr int64_t kRows = 1100, kWidth = 2, kVocabulary = 16'411;
  const auto generator = at::detail::createCPUGenerator(3);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor hidden = at::randn({kRows, kWidth}, generator, options);
  const at::Tensor weight =
      at::randn({kVocabulary, kWidth}, generator, options);
  const at::Tensor targets = at::arange(kRows).mul(13).remainder(kVocabulary);
  const at::Tensor wanted = hidden.clone();
  at::Tensor all = weight.clone().requires_grad_();
  const nn::LossSum whole =
      nn::head_loss({all, nullptr, kVocabulary}, wanted, targets, 0.5);
  comm::run_threads(2, "shm", [&](comm::Communicator& communicator) {
    comm::Group& group = communicator.world();
    const auto range = mesh::chunk_of(kVocabulary, 2, group.rank());
    const int64_t most = mesh::chunk_of(kVocabulary, 2, 0).size();
    ASSERT_LT(nn::head_rows(kRows, most), kRows);
    at::Tensor own = weight.narrow(0, range.begin, range.size()).clone();
    own.requires_grad_();
    at::Tensor gradient = hidden.clone();
    const nn::LossSum part = nn::head_loss(
        {own, vocabulary_loss({range.begin, kVocabulary, &group}), most},
        gradient, targets, 0.5);
    group.all_reduce(gradient, comm::ReduceOp::kSum, comm::Mode::kBlocking);
    EXPECT_NEAR(part.sum.item<double>(), whole.sum.item<double>(), 1e-9);
    EXPECT_TRUE(at::allclose(gradient, wanted, 1e-10, 1e-13));
    EXPECT_TRUE(at::allclose(own.grad(),
                             all.grad().narrow(0, range.begin, range.size()),
                             1e-10, 1e-13));
  });
}

TEST(VocabularyShard, ATargetOutsideTheVocabularyIsRefused) {
  comm::run_threads(2, "shm", [&](comm::Communicator& communicator) {
    const VocabularyShard shard{communicator.rank() * 2, 4,
                                &communicator.world()};
    EXPECT_THROW(
        nn::cross_entropy(at::zeros({1, 2}), at::full({1}, 4, at::kLong),
                          vocabulary_loss(shard)),
        Error);
  });
}

}  // namespace
}  // namespace tessera::parallel::tensor
