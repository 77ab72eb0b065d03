#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/parallel/expert/expert_parallel.h"

namespace tessera::parallel::expert {
namespace {

using mesh::Axis;
using mesh::Placement;

constexpr int64_t kWidth = 6, kExperts = 4;

nn::MoeOptions options_of(int64_t top_k) {
  return {.router = {.experts = kExperts, .top_k = top_k},
          .expert = {.width = kWidth, .hidden = 5},
          .shared_width = 3};
}

void expect_close(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_LT((a - b).abs().max().item<double>(), 1e-14);
}

// Each of the ranks holds its experts alone; most tokens go to the last one.
std::shared_ptr<nn::Moe> make(int64_t top_k, int64_t ranks, int64_t rank) {
  auto moe = std::make_shared<nn::Moe>(options_of(top_k));
  for (const auto& parameter : nn::parameters_of(*moe)) {
    mesh::Layout& layout = parameter.spec->layout;
    if (!layout.is_of_expert()) continue;
    layout = layout.with(Axis::kEp, Placement::shard(0));
  }
  const mesh::DeviceMesh mesh({.dp_replicate = ranks, .ep = ranks}, ranks);
  nn::materialise(*moe, mesh, mesh.coord_of(rank),
                  {.seed = 7, .dtype = at::kDouble});
  const at::NoGradGuard no_grad;
  moe->gate()->weight().zero_();
  moe->gate()->weight()[3].fill_(10);
  return moe;
}

struct Case {
  int64_t ranks, tokens, top_k;
  bool shares_tokens;  // each rank routes some of them, else all
};

nn::ExpertShard shard_of(const Case& c, int64_t chunks, comm::Group& group) {
  nn::ExpertShard shard;
  shard.dispatch = [&group, chunks](const at::Tensor& rows,
                                    const at::Tensor& counts,
                                    const nn::Experts& experts,
                                    const std::function<void()>& beside) {
    const auto run = [&experts](const at::Tensor& at_experts,
                                const std::vector<int64_t>& splits) {
      return experts.forward(at_experts, nn::RowGroups(splits));
    };
    return dispatch(rows, counts, run, group, {chunks, beside});
  };
  if (c.shares_tokens) {
    shard.sample_parts = c.ranks;
    shard.sample_part = group.rank();
    shard.split = split_over(group);
  } else {
    shard.copies = c.ranks;
    shard.copy = group.rank();
  }
  return shard;
}

// With top_k 1 all go to expert 3, which the last rank has: the others get
// none. Of one token that ranks share out all but one have none to send.
class DispatchTest : public ::testing::TestWithParam<Case> {};

TEST_P(DispatchTest, IsAsOnOneRank) {
  const Case& c = GetParam();
  at::manual_seed(1);
  const at::Tensor x =
      at::randn({1, c.tokens, kWidth}, at::kDouble).abs().requires_grad_();
  const auto whole = make(c.top_k, 1, 0);
  const at::Tensor y = whole->forward(x);
  const double times = c.shares_tokens ? 1.0 : static_cast<double>(c.ranks);
  (times * y.sum()).backward();
  comm::run_threads(c.ranks, "shm", [&](comm::Communicator& ranks) {
    comm::Group& group = ranks.world();
    const auto moe = make(c.top_k, c.ranks, group.rank());
    moe->set_shard(shard_of(c, /*chunks=*/0, group));
    const at::Tensor here = x.detach().clone().requires_grad_();
    const at::Tensor z = moe->forward(here);
    z.sum().backward();
    at::Tensor sum = z.detach().clone();
    group.all_reduce(sum, comm::ReduceOp::kSum, comm::Mode::kBlocking);
    expect_close(sum, static_cast<double>(c.ranks) * y);
    if (c.shares_tokens) expect_close(here.grad(), x.grad());
    const int64_t local = kExperts / c.ranks;
    const at::Tensor grad = moe->experts()->up()->weight().grad();
    expect_close(grad, whole->experts()->up()->weight().grad().narrow(
                           0, group.rank() * local, local));
    const bool gets_rows = c.top_k == kExperts || group.rank() == c.ranks - 1;
    EXPECT_EQ(grad.abs().sum().item<double>() > 0, gets_rows);
  });
}

// 3: more than a rank has experts, or a number that does not divide them.
TEST_P(DispatchTest, ChunksChangeNoBit) {
  const Case& c = GetParam();
  comm::run_threads(c.ranks, "shm", [&](comm::Communicator& ranks) {
    comm::Group& group = ranks.world();
    const auto moe = make(c.top_k, c.ranks, group.rank());
    at::manual_seed(1);
    const at::Tensor x = at::randn({2, c.tokens, kWidth}, at::kDouble);
    const auto run = [&](int64_t chunks) {
      moe->zero_grad();
      moe->set_shard(shard_of(c, chunks, group));
      const at::Tensor here = x.clone().requires_grad_();
      const at::Tensor y = moe->forward(here);
      y.square().sum().backward();
      std::vector<at::Tensor> all = {y.detach(), here.grad()};
      for (const at::Tensor& parameter : moe->parameters()) {
        all.push_back(parameter.grad().clone());
      }
      return all;
    };
    const auto at_once = run(0);
    for (const int64_t chunks : {1, 2, 3}) {
      const auto found = run(chunks);
      for (size_t i = 0; i < at_once.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i], at_once[i])) << chunks << ": " << i;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Loads, DispatchTest,
    ::testing::Values(Case{1, 4, kExperts, true}, Case{2, 4, 1, false},
                      Case{2, 5, kExperts, true}, Case{4, 4, 1, false},
                      Case{4, 1, 1, false}, Case{4, 1, 1, true},
                      Case{4, 1, kExperts, true}, Case{4, 5, kExperts, true},
                      Case{4, 5, kExperts, false}),
    [](const auto& info) {
      const Case& c = info.param;
      return c10::str("Ranks", c.ranks, "Tokens", c.tokens, "TopK", c.top_k,
                      c.shares_tokens ? "Shared" : "");
    });

}  // namespace
}  // namespace tessera::parallel::expert
