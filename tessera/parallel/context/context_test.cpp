#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "tessera/comm/communicator.h"
#include "tessera/parallel/context/context_parallel.h"
#include "tests/support/masks.h"

namespace tessera::parallel::context {
namespace {

constexpr int64_t kSamples = 2, kTokens = 24, kWidth = 6;

struct Example {
  at::Tensor q, k, v, gradient;
};

Example example(int64_t heads, int64_t kv_heads, at::ScalarType type) {
  const auto generator = at::detail::createCPUGenerator(7);
  const auto normal = [&](int64_t count) {
    return at::randn({kSamples, kTokens, count, kWidth}, generator,
                     at::TensorOptions().dtype(at::kDouble))
        .to(type);
  };
  return {normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)};
}

std::vector<at::Tensor> with_gradients(
    const Example& of,
    const std::function<at::Tensor(const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&)>& attention) {
  std::vector<at::Tensor> leaves;
  for (const auto& tensor : {of.q, of.k, of.v}) {
    leaves.push_back(tensor.detach().clone().requires_grad_());
  }
  const at::Tensor y = attention(leaves[0], leaves[1], leaves[2]);
  torch::autograd::backward({y}, {of.gradient});
  return {y.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
}

// By a mask, which is how it is defined.
at::Tensor whole_attention(const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const nn::Sight& sight) {
  const at::Tensor place = at::arange(kTokens);
  at::Tensor sees = (place <= place.unsqueeze(1)).unsqueeze(0);
  if (sight.window > 0) {
    sees = sees.logical_and(place > place.unsqueeze(1) - sight.window);
  }
  if (sight.document_starts.defined()) {
    sees = sees.logical_and(place.view({1, 1, -1}) >=
                            sight.document_starts.unsqueeze(2));
  }
  const auto by_head = [&](const at::Tensor& x) {
    return x.repeat_interleave(q.size(2) / x.size(2), 2).transpose(1, 2);
  };
  const at::Tensor scores = at::matmul(by_head(q), by_head(k).transpose(2, 3)) /
                            std::sqrt(static_cast<double>(kWidth));
  at::Tensor weights =
      scores.masked_fill(sees.logical_not().unsqueeze(1), -INFINITY)
          .softmax(-1);
  if (sight.dropout) {
    const auto run = masks::run_of(0, kTokens);
    weights =
        weights * masks::mask_of(sight.dropout, kSamples, q.size(2), run, run)
                      .to(weights.scalar_type());
  }
  return at::matmul(weights, by_head(v)).transpose(1, 2);
}

using Method = at::Tensor (*)(const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const nn::Sight&,
                              comm::Group&);

// Output and gradients of every rank's tokens are those of the whole.
void expect_parts_of_the_whole(Method method, int64_t ranks, int64_t heads,
                               int64_t kv_heads, at::ScalarType type,
                               double bound, const nn::Sight& sight = {}) {
  const Example of = example(heads, kv_heads, type);
  const auto whole = with_gradients(
      of, [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
        return whole_attention(q, k, v, sight);
      });
  comm::run_threads(ranks, "shm", [&](comm::Communicator& communicator) {
    comm::Group& group = communicator.world();
    const auto mine = [&](const at::Tensor& x) {
      return local_tokens(x, group.rank(), ranks);
    };
    const auto part = with_gradients(
        {mine(of.q), mine(of.k), mine(of.v), mine(of.gradient)},
        [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return method(q, k, v, sight, group);
        });
    for (size_t i = 0; i < whole.size(); ++i) {
      const at::Tensor expected = mine(whole[i]);
      EXPECT_EQ(part[i].sizes(), expected.sizes());
      EXPECT_LE(
          (part[i] - expected).to(at::kDouble).norm().item<double>(),
          bound * std::max(1.0, expected.to(at::kDouble).norm().item<double>()))
          << "tensor " << i << " of rank " << group.rank() << " of " << ranks;
    }
  });
}

TEST(Context, EveryMethodIsCausalAttentionOfTheWhole) {
  for (const Method method :
       {ring_attention, gathered_attention, ulysses_attention}) {
    for (const int64_t ranks : {1, 2, 4}) {
      for (const int64_t kv_heads : {1, 2, 4}) {
        expect_parts_of_the_whole(method, ranks, 4, kv_heads, at::kDouble,
                                  1e-13);
      }
    }
    expect_parts_of_the_whole(method, 2, 4, 2, at::kFloat, 1e-5);
    expect_parts_of_the_whole(method, 2, 4, 2, at::kBFloat16, 2e-2);
    expect_parts_of_the_whole(method, 2, 4, 2, at::kHalf, 3e-3);
  }
}

// Odd numbers of ranks, for the methods that do not hand out heads.
TEST(Context, ThreeRanks) {
  for (const Method method : {ring_attention, gathered_attention}) {
    expect_parts_of_the_whole(method, 3, 2, 1, at::kDouble, 1e-13);
  }
}

// Documents that end with a piece, within one, and go over several.
at::Tensor starts_of_documents() {
  std::vector<int64_t> starts;
  for (const auto& begins : {std::vector<int64_t>{0, 1, 2, 9, 12, 18},
                             std::vector<int64_t>{0, 6, 7, 23}}) {
    for (int64_t t = 0; t < kTokens; ++t) {
      starts.push_back(*std::prev(std::ranges::upper_bound(begins, t)));
    }
  }
  return at::tensor(starts).view({kSamples, kTokens});
}

TEST(Context, DocumentsDoNotSeeEachOther) {
  const nn::Sight of_samples{starts_of_documents()};
  for (const Method method :
       {ring_attention, gathered_attention, ulysses_attention}) {
    for (const int64_t ranks : {1, 2, 4}) {
      expect_parts_of_the_whole(method, ranks, 4, 2, at::kDouble, 1e-13,
                                of_samples);
    }
    expect_parts_of_the_whole(method, 2, 4, 2, at::kBFloat16, 2e-2, of_samples);
  }
}

// The whole sequence's masks, by heads and positions that are counted in all.
TEST(Context, DropoutIsThatOfTheWhole) {
  nn::Dropout dropout = nn::dropout_named("attention", 0.3, {7, 3, 5});
  dropout.first_head = 2;
  for (const Method method :
       {ring_attention, gathered_attention, ulysses_attention}) {
    for (const nn::Sight& sight :
         {nn::Sight{{}, dropout}, nn::Sight{starts_of_documents(), dropout}}) {
      for (const int64_t ranks : {1, 2, 4}) {
        expect_parts_of_the_whole(method, ranks, 4, 2, at::kDouble, 1e-13,
                                  sight);
      }
      expect_parts_of_the_whole(method, 2, 4, 2, at::kFloat, 1e-5, sight);
      expect_parts_of_the_whole(method, 2, 4, 2, at::kBFloat16, 2e-2, sight);
    }
  }
}

// Windows that end within a piece, with one, and go over several.
TEST(Context, WindowsAreThoseOfTheWhole) {
  nn::Dropout dropout = nn::dropout_named("attention", 0.3, {7, 3, 5});
  for (const Method method :
       {ring_attention, gathered_attention, ulysses_attention}) {
    for (const int64_t window : {1, 2, 3, 4, 6, 7, 13, 23, 24, 40}) {
      for (const int64_t ranks : {1, 2, 4}) {
        expect_parts_of_the_whole(method, ranks, 4, 2, at::kDouble, 1e-13,
                                  {.window = window});
      }
    }
    for (const int64_t window : {2, 5, 9}) {
      for (const nn::Sight& sight :
           {nn::Sight{{}, dropout, window},
            nn::Sight{starts_of_documents(), {}, window},
            nn::Sight{starts_of_documents(), dropout, window}}) {
        expect_parts_of_the_whole(method, 2, 4, 2, at::kDouble, 1e-13, sight);
        expect_parts_of_the_whole(method, 4, 4, 1, at::kDouble, 1e-13, sight);
      }
      const nn::Sight sight{.window = window};
      expect_parts_of_the_whole(method, 2, 4, 2, at::kFloat, 1e-5, sight);
      expect_parts_of_the_whole(method, 2, 4, 2, at::kBFloat16, 2e-2, sight);
      expect_parts_of_the_whole(method, 2, 4, 2, at::kHalf, 3e-3, sight);
    }
  }
}

// Pairs of pieces that a rank computes: as many on every rank.
TEST(Context, WorkIsBalanced) {
  for (const int64_t degree : {2, 3, 8}) {
    for (int64_t rank = 0; rank < degree; ++rank) {
      int64_t seen = 0;
      for (int64_t piece : pieces_of(rank, degree)) seen += piece + 1;
      EXPECT_EQ(seen, 2 * degree + 1);
    }
  }
}

}  // namespace
}  // namespace tessera::parallel::context
