#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/parallel/expert/expert_parallel.h"

namespace tessera::parallel::expert {
namespace {

using mesh::Axis;
using mesh::Placement;

constexpr int64_t kWidth = 6, kExperts = 4;
constexpr nn::MoeOptions kOptions{.router = {.experts = kExperts, .top_k = 1},
                                  .expert = {.width = kWidth, .hidden = 5}};

void expect_close(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_LT((a - b).abs().max().item<double>(), 1e-14);
}

// Each of two ranks holds its two experts alone.
std::shared_ptr<nn::Moe> make(int64_t ranks, int64_t rank) {
  auto moe = std::make_shared<nn::Moe>(kOptions);
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

// Both ranks' tokens all go to expert 3, which rank 1 has: rank 0 gets none.
TEST(Dispatch, ARankWithoutAToken) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({1, 4, kWidth}, at::kDouble).abs();
  const auto whole = make(1, 0);
  const at::Tensor y = whole->forward(x);
  (2 * y.sum()).backward();
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    comm::Group& group = ranks.world();
    const auto moe = make(2, group.rank());
    moe->set_shard(
        {.dispatch = [&group](const at::Tensor& rows, const at::Tensor& counts,
                              const nn::Experts& experts) {
          const auto run = [&experts](const at::Tensor& at_experts,
                                      const std::vector<int64_t>& splits) {
            return experts.forward(at_experts, splits);
          };
          return dispatch(rows, counts, run, group);
        }});
    const at::Tensor mine = x.clone().requires_grad_();
    const at::Tensor z = moe->forward(mine);
    expect_close(z, y);
    z.sum().backward();
    const auto here = [&](const at::Tensor& all) {
      return all.narrow(0, group.rank() * kExperts / 2, kExperts / 2);
    };
    const at::Tensor grad = moe->experts()->up()->weight().grad();
    expect_close(grad, here(whole->experts()->up()->weight().grad()));
    EXPECT_EQ(grad.abs().sum().item<double>() > 0, group.rank() == 1);
  });
}

}  // namespace
}  // namespace tessera::parallel::expert
