// A mixture of experts, four of 32 on each of eight ranks, by DeepSpeed's file:
//   example_08_experts examples/experts.json
#include <torch/torch.h>

#include <iostream>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/module_engine/initialize.h"
#include "tessera/wrappers/moe.h"

namespace nn = torch::nn;
namespace ts = tessera;

constexpr int64_t kWidth = 2048;

void train(const std::string& json, ts::comm::Communicator& ranks) {
  const auto mesh = ts::mesh_of(json, ranks.world_size());
  ts::MoE moe{nullptr};
  ts::comm::in_turn(ranks.world(), [&] {
    torch::manual_seed(0);
    moe = ts::MoE(
        kWidth, /*experts=*/32, /*k=*/2,
        [] { return nn::Linear(kWidth, kWidth); }, mesh, ranks);
  });
  auto engine = ts::initialize(moe, json, ranks);
  auto random = at::make_generator<at::CPUGeneratorImpl>(ranks.rank());
  const int64_t samples = engine.train_micro_batch_size_per_gpu();
  while (engine.global_steps() < 3) {
    const auto input = torch::randn({samples, /*tokens=*/2, kWidth}, random);
    const auto [output, aux_loss, counts] = engine.forward(input);
    const auto loss = torch::mse_loss(output, input) + 0.01 * aux_loss;
    engine.backward(loss);
    engine.step();
    at::Tensor mean = loss.detach().clone();
    ranks.world().all_reduce(mean, ts::comm::ReduceOp::kMean).synchronize();
    if (ranks.rank() != 0) continue;
    std::cout << "step " << engine.global_steps() << ": loss "
              << mean.item<float>() << ", output " << output.sizes() << "\n";
  }
}

int main(int argc, char** argv) {
  const std::string json = argc > 1 ? argv[1] : "experts.json";
  try {
    ts::comm::run_threads(/*world_size=*/8, "shm",
                          [&](auto& ranks) { train(json, ranks); });
  } catch (const std::exception& error) {
    std::cerr << ts::message_of(error) << "\n";
    return 1;
  }
}
