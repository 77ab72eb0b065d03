// A small net on ranks that are threads, for what initialize() and checkpoints
// make of it.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tests/support/own_modules.h"

namespace tessera::tests {

inline constexpr int64_t kBatch = 12;

inline torch::nn::Sequential small_net(at::ScalarType type = at::kDouble) {
  namespace nn = torch::nn;
  nn::Sequential net(nn::Linear(5, 11), nn::Tanh(), nn::Linear(11, 3));
  net->to(type);
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(3);
  for (auto& p : net->parameters()) p.normal_(0, 0.3, generator);
  return net;
}

inline at::Tensor batch_of(int64_t update) {
  return at::arange(kBatch * 5, at::kDouble)
      .mul(0.37)
      .add(0.1 * static_cast<double>(update))
      .sin()
      .view({kBatch, 5});
}

using NetBody = std::function<void(comm::Communicator&, torch::nn::Sequential)>;

inline void on_ranks(int64_t world, const NetBody& body,
                     at::ScalarType type = at::kDouble) {
  comm::run_threads(world, "shm", [&](comm::Communicator& ranks) {
    torch::nn::Sequential net{nullptr};
    comm::in_turn(ranks.world(), [&] { net = small_net(type); });
    body(ranks, net);
  });
}

}  // namespace tessera::tests
