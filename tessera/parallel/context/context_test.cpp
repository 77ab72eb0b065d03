#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <iterator>

#include "tessera/comm/communicator.h"
#include "tessera/parallel/context/context_parallel.h"

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
                           const at::Tensor& v, const at::Tensor& starts) {
  const at::Tensor place = at::arange(kTokens);
  at::Tensor sees = (place <= place.unsqueeze(1)).unsqueeze(0);
  if (starts.defined()) {
    sees = sees.logical_and(place.view({1, 1, -1}) >= starts.unsqueeze(2));
  }
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2),
                                          v.transpose(1, 2), sees.unsqueeze(1),
                                          0.0, /*is_causal=*/false, {},
                                          /*enable_gqa=*/true)
      .transpose(1, 2);
}

using Method = at::Tensor (*)(const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const at::Tensor&,
                              comm::Group&);

// Output and gradients of every rank's tokens are those of the whole.
void expect_parts_of_the_whole(Method method, int64_t ranks, int64_t heads,
                               int64_t kv_heads, at::ScalarType type,
                               double bound, const at::Tensor& starts = {}) {
  const Example of = example(heads, kv_heads, type);
  const auto whole = with_gradients(
      of, [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
        return whole_attention(q, k, v, starts);
      });
  comm::run_threads(ranks, "shm", [&](comm::Communicator& communicator) {
    comm::Group& group = communicator.world();
    const auto mine = [&](const at::Tensor& x) {
      return local_tokens(x, group.rank(), ranks);
    };
    const auto part = with_gradients(
        {mine(of.q), mine(of.k), mine(of.v), mine(of.gradient)},
        [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return method(q, k, v, starts, group);
        });
    for (size_t i = 0; i < whole.size(); ++i) {
      const at::Tensor expected = mine(whole[i]);
      EXPECT_EQ(part[i].sizes(), expected.sizes());
      EXPECT_LE((part[i] - expected).to(at::kDouble).norm().item<double>(),
                bound * expected.to(at::kDouble).norm().item<double>())
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
  }
}

// Odd numbers of ranks, for the methods that do not hand out heads.
TEST(Context, ThreeRanks) {
  for (const Method method : {ring_attention, gathered_attention}) {
    expect_parts_of_the_whole(method, 3, 2, 1, at::kDouble, 1e-13);
  }
}

// Documents that end with a piece, within one, and go over several.
TEST(Context, DocumentsDoNotSeeEachOther) {
  std::vector<int64_t> starts;
  for (const auto& begins : {std::vector<int64_t>{0, 1, 2, 9, 12, 18},
                             std::vector<int64_t>{0, 6, 7, 23}}) {
    for (int64_t t = 0; t < kTokens; ++t) {
      starts.push_back(*std::prev(std::ranges::upper_bound(begins, t)));
    }
  }
  const at::Tensor of_samples = at::tensor(starts).view({kSamples, kTokens});
  for (const Method method :
       {ring_attention, gathered_attention, ulysses_attention}) {
    for (const int64_t ranks : {1, 2, 4}) {
      expect_parts_of_the_whole(method, ranks, 4, 2, at::kDouble, 1e-13,
                                of_samples);
    }
    expect_parts_of_the_whole(method, 2, 4, 2, at::kBFloat16, 2e-2, of_samples);
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
