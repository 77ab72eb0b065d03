// A user's module on eight ranks: two stages of a pipeline, whose layers are
// split over two ranks, and each rank's part shared out over two that see other
// data (ZeRO 3). What they save one rank loads, whole.
#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <string>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/files.h"
#include "tessera/module_engine/sharded_checkpoint.h"
#include "tessera/wrappers/parallelize.h"
#include "tessera/wrappers/pipe.h"

namespace nn = torch::nn;
namespace ts = tessera;
using ts::mesh::Axis;

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

nn::Sequential make_net() {
  torch::manual_seed(0);
  return nn::Sequential(nn::Linear(2, 32), Block(), Block(), Block(),
                        nn::Linear(32, 1));
}

at::Tensor points_of(at::Generator random) {
  return torch::rand({64, 2}, std::move(random));
}
at::Tensor wanted(const at::Tensor& points) {
  return points.prod(1, /*keepdim=*/true);
}
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}
constexpr uint64_t kUnseenSeed = 99;

// The loss on data that nobody has trained on.
double train(ts::comm::Communicator& ranks, const std::string& folder) {
  const ts::mesh::DeviceMesh mesh({.pp = 2, .dp_shard = 2, .tp = 2}, 8);
  const auto coord = mesh.coord_of(ranks.rank());
  const int64_t stage = coord[Axis::kPp];
  nn::Sequential own{nullptr};  // what this rank does not run is let go of
  ts::comm::in_turn(ranks.world(),
                    [&] { own = ts::split(make_net(), /*parts=*/2)[stage]; });
  const auto parallel = ts::parallelize(*own, mesh, ranks,
                                        {{"*.up", ts::ParallelStyle::column()},
                                         {"*.down", ts::ParallelStyle::row()}});
  auto part = ts::fully_shard(own, mesh, ranks);
  const auto pipeline =
      ranks.make_group(mesh.peers(ranks.rank(), {Axis::kPp}), "pp");
  ts::Schedule schedule({{part, stage, /*num_stages=*/2}}, *pipeline,
                        {.num_microbatches = 4, .loss = loss_of});
  torch::optim::AdamW optimizer(own->parameters(), /*lr=*/3e-3);
  ts::ShardedCheckpoint checkpoint(folder, schedule.stages(), optimizer, ranks);
  // The ranks that split a layer, or are of one pipeline, see the same data;
  // the loss is that of one pipeline.
  const auto random =
      at::make_generator<at::CPUGeneratorImpl>(coord[Axis::kDpShard]);
  for (int step = 0; step <= 60; ++step) {
    const auto points = points_of(random);
    optimizer.zero_grad();
    const double loss = schedule.step(points, wanted(points)).loss;
    schedule.clip_grad_norm(1.0);
    optimizer.step();
    if (ranks.rank() != 0 || step % 20 != 0) continue;
    std::cout << "step " << step << " loss " << loss << "\n";
  }
  checkpoint.save(/*step=*/61);
  const auto points =
      points_of(at::make_generator<at::CPUGeneratorImpl>(kUnseenSeed));
  return schedule.eval(points, wanted(points)).loss;
}

double load_on_one(ts::comm::Communicator& ranks, const std::string& folder) {
  auto net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), /*lr=*/3e-3);
  ts::ShardedCheckpoint(folder, *net, optimizer, ranks).load();
  const auto points =
      points_of(at::make_generator<at::CPUGeneratorImpl>(kUnseenSeed));
  const at::NoGradGuard no_grad;
  return loss_of(net->forward(points), wanted(points)).item<double>();
}

int main() {
  const ts::TemporaryFolder folder;
  double of_eight = 0, of_one = 0;
  ts::comm::run_threads(/*world_size=*/8, "shm", [&](auto& ranks) {
    const double loss = train(ranks, folder.path());
    if (ranks.rank() == 0) of_eight = loss;
  });
  ts::comm::run_threads(/*world_size=*/1, "shm", [&](auto& ranks) {
    of_one = load_on_one(ranks, folder.path());
  });
  std::cout << "unseen: eight ranks " << of_eight << ", one rank " << of_one
            << "\n";
  return std::abs(of_eight - of_one) < 1e-6 ? 0 : 1;
}
