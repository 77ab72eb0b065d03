// DeepSpeed's engine around a module: what its file says, on the ranks that a
// launcher started, or on one:
//   tessera launch -n 2 -- example_07_initialize examples/zero.json
#include <torch/torch.h>

#include <iostream>

#include "tessera/core/error.h"
#include "tessera/module_engine/initialize.h"

namespace nn = torch::nn;
namespace ts = tessera;

void train(const std::string& json) {
  torch::manual_seed(0);
  nn::Sequential net(nn::Linear(1024, 4096), nn::ReLU(), nn::Linear(4096, 10));
  auto engine = ts::initialize(net, json);
  auto random = at::make_generator<at::CPUGeneratorImpl>(engine.rank());
  const int64_t micro_batch = engine.train_micro_batch_size_per_gpu();
  while (engine.global_steps() < 4) {
    const auto input = torch::rand({micro_batch, 1024}, random);
    const auto loss = engine.forward(input).mean();
    engine.backward(loss);
    engine.step();
    if (engine.rank() != 0) continue;
    std::cout << "step " << engine.global_steps() << ", " << micro_batch
              << " samples on each of " << engine.world_size()
              << " ranks: loss " << loss.item<float>() << "\n";
  }
}

int main(int argc, char** argv) {
  try {
    train(argc > 1 ? argv[1] : "zero.json");
  } catch (const ts::Error& error) {
    std::cerr << ts::message_of(error) << "\n";
    return static_cast<int>(error.exit_code());
  }
}
