// A user's module on a mesh of 2 x 2: its layers split over two ranks by a
// plan, and what is left shared out over two that see other data (ZeRO 3).
#include <torch/torch.h>

#include <iostream>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/parallelize.h"

namespace nn = torch::nn;
namespace ts = tessera;

struct BlockImpl : nn::Module {
  nn::LayerNorm norm{nn::LayerNormOptions({32})};
  nn::Linear up{32, 128}, down{128, 32};
  BlockImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + down->forward(at::gelu(up->forward(norm->forward(x))));
  }
};
TORCH_MODULE(Block);

void train(ts::comm::Communicator& ranks) {
  nn::Sequential net{nullptr};
  ts::comm::in_turn(ranks.world(), [&] {
    torch::manual_seed(0);
    net =
        nn::Sequential(nn::Linear(2, 32), Block(), Block(), nn::Linear(32, 1));
  });
  const ts::mesh::DeviceMesh mesh({.dp_shard = 2, .tp = 2}, 4);
  // Columns of the first linear of a block, rows of the second.
  const auto parallel = ts::parallelize(*net, mesh, ranks,
                                        {{"*.up", ts::ParallelStyle::column()},
                                         {"*.down", ts::ParallelStyle::row()}});
  auto model = ts::fully_shard(net, mesh, ranks);
  torch::optim::AdamW optimizer(net->parameters(), /*lr=*/3e-3);
  // The ranks that split a layer see the same data.
  const auto coord = mesh.coord_of(ranks.rank());
  auto random =
      at::make_generator<at::CPUGeneratorImpl>(coord[ts::mesh::Axis::kDpShard]);
  for (int step = 0; step <= 60; ++step) {
    const auto points = torch::rand({64, 2}, random);
    const auto wanted = points.prod(1, /*keepdim=*/true);
    const auto loss = torch::mse_loss(model.forward(points), wanted);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (ranks.rank() != 0 || step % 20 != 0) continue;
    std::cout << "step " << step << " loss " << loss.item<float>() << "\n";
  }
}

int main() { ts::comm::run_threads(/*world_size=*/4, "shm", train); }
