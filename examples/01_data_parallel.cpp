// A small ResNet on made images, data parallel over four ranks.
#include <torch/torch.h>

#include <iostream>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/wrappers/distributed_data_parallel.h"

namespace nn = torch::nn;
// By a name, and not by "using namespace": tessera has an nn of its own.
namespace ts = tessera;

struct BlockImpl : nn::Module {
  nn::Sequential path{nullptr};
  explicit BlockImpl(int64_t width) {
    const auto conv = nn::Conv2dOptions(width, width, 3).padding(1);
    path = register_module(
        "path", nn::Sequential(nn::Conv2d(conv), nn::BatchNorm2d(width),
                               nn::ReLU(), nn::Conv2d(conv)));
  }
  at::Tensor forward(const at::Tensor& x) { return path->forward(x) + x; }
};
TORCH_MODULE(Block);

void train(ts::comm::Communicator& ranks) {
  // Ranks that are threads share torch's random numbers: they draw weights one
  // after the other, and data from numbers of their own.
  nn::Sequential resnet{nullptr};
  ts::comm::in_turn(ranks.world(), [&] {
    torch::manual_seed(0);
    resnet = nn::Sequential(nn::Conv2d(3, 16, 3), Block(16), Block(16),
                            nn::AdaptiveAvgPool2d(1), nn::Flatten(),
                            nn::Linear(16, 4));
  });
  auto random = at::make_generator<at::CPUGeneratorImpl>(ranks.rank());
  ts::DistributedDataParallel model(resnet, ranks.world());
  torch::optim::SGD optimizer(resnet->parameters(), /*lr=*/0.1);
  for (int step = 0; step <= 60; ++step) {
    const auto labels = torch::randint(4, {16}, random);  // the bright one
    const auto bright = torch::one_hot(labels, 4).narrow(1, 0, 3);
    const auto images =
        torch::rand({16, 3, 8, 8}, random) + bright.view({16, 3, 1, 1});
    const auto loss =
        nn::functional::cross_entropy(model.forward(images), labels);
    model.backward(loss);  // averages the gradients while backward runs
    optimizer.step();
    if (ranks.rank() == 0 && step % 20 == 0) {
      std::cout << "step " << step << " loss " << loss.item<float>() << "\n";
    }
  }
}

int main() { ts::comm::run_threads(/*world_size=*/4, "shm", train); }
