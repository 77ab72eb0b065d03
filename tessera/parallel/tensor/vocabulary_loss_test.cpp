#include "tessera/parallel/tensor/vocabulary_loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
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
      at::tensor({4L, 0L, nn::kIgnoreIndex, 2L, 3L, 1L}).view({2, 3});
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
