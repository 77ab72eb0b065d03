// A ResNet-50 on two ranks, cut behind layer2: micro-batches go through both
// by 1F1B.
#include <torch/torch.h>

#include <iostream>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/wrappers/pipe.h"

namespace nn = torch::nn;
namespace ts = tessera;

nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel)
                        .stride(stride)
                        .padding(kernel / 2)
                        .bias(false));
}

struct BottleneckImpl : nn::Module {
  nn::Sequential path{nullptr}, shortcut;
  BottleneckImpl(int64_t in, int64_t width, int64_t stride) {
    const int64_t out = 4 * width;
    path =
        nn::Sequential(conv(in, width, 1), nn::BatchNorm2d(width), nn::ReLU(),
                       conv(width, width, 3, stride), nn::BatchNorm2d(width),
                       nn::ReLU(), conv(width, out, 1), nn::BatchNorm2d(out));
    register_module("path", path);
    if (in == out) return;
    shortcut = nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out));
    register_module("shortcut", shortcut);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto beside = shortcut->is_empty() ? x : shortcut->forward(x);
    return torch::relu(path->forward(x) + beside);
  }
};
TORCH_MODULE(Bottleneck);

// Sequentials lie in each other only where their forward() is no template.
struct LayerImpl : nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) { return SequentialImpl::forward(x); }
};
TORCH_MODULE(Layer);

Layer layer(int64_t in, int64_t width, int64_t blocks, int64_t step) {
  Layer all(Bottleneck(in, width, step));
  while (--blocks > 0) all->push_back(Bottleneck(4 * width, width, 1));
  return all;
}

nn::Sequential resnet50() {
  torch::manual_seed(0);
  return nn::Sequential(
      {{"conv1", conv(3, 64, 7, 2)},
       {"bn1", nn::BatchNorm2d(64)},
       {"relu", nn::ReLU()},
       {"maxpool", nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1))},
       {"layer1", layer(64, 64, 3, 1)},
       {"layer2", layer(256, 128, 4, 2)},
       {"layer3", layer(512, 256, 6, 2)},
       {"layer4", layer(1024, 512, 3, 2)},
       {"avgpool", nn::AdaptiveAvgPool2d(1)},
       {"flatten", nn::Flatten()},
       {"fc", nn::Linear(2048, 1000)}});
}

void train(ts::comm::Communicator& ranks) {
  nn::Sequential part{nullptr};  // what this rank does not run is let go of
  ts::comm::in_turn(ranks.world(), [&] {
    part = ts::split(resnet50(), {6, 5})[ranks.rank()];
  });
  int64_t parameters = 0;
  for (const auto& each : part->parameters()) parameters += each.numel();
  const ts::PipelineStage stage(part, ranks.rank(), /*num_stages=*/2);
  ts::Schedule schedule(
      {stage}, ranks.world(),
      {.schedule = "1f1b",
       .num_microbatches = 4,
       .loss = [](const at::Tensor& output, const at::Tensor& target) {
         return torch::cross_entropy_loss(output, target);
       }});
  torch::optim::SGD optimizer(part->parameters(), /*lr=*/0.01);
  auto random = at::make_generator<at::CPUGeneratorImpl>(/*seed=*/1);
  const auto images = torch::rand({16, 3, 64, 64}, random);
  const auto labels = torch::randint(1000, {16}, random);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const double loss = schedule.step(images, labels).loss;  // on every rank
    optimizer.step();
    if (ranks.rank() == 0)
      std::cout << "step " << step << " loss " << loss << "\n";
  }
  ts::comm::in_turn(ranks.world(), [&] {
    std::cout << "rank " << ranks.rank() << ": " << parameters
              << " parameters, the last is "
              << part->named_parameters().back().key() << "\n";
  });
}

int main() { ts::comm::run_threads(/*world_size=*/2, "shm", train); }
