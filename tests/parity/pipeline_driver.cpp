// What tests/parity/test_pipelining.py runs: residual blocks of plain torch::nn
// in a pipeline, as one of the ranks that a launcher started. The script has
// the same in PyTorch.
//
//   pipeline_driver SCHEDULE CHUNKS
// Rank 0 prints the loss of each of five steps, and a sum over all weights.
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <string>

#include "tessera/core/error.h"
#include "tessera/module_engine/started_ranks.h"
#include "tessera/wrappers/pipe.h"
#include "tests/support/values_by_name.h"

namespace {

using namespace tessera;
namespace nn = torch::nn;

constexpr int64_t kWidth = 16, kBlocks = 8, kRows = 24, kMicrobatches = 6;
constexpr int kSteps = 5;

struct BlockImpl : nn::Module {
  nn::LayerNorm norm{nn::LayerNormOptions({kWidth})};
  nn::Linear in{kWidth, 4 * kWidth}, out{4 * kWidth, kWidth};
  BlockImpl() {
    register_module("norm", norm);
    register_module("in", in);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + out(torch::gelu(in(norm(x))));
  }
};
TORCH_MODULE(Block);

nn::Sequential make_net() {
  nn::Sequential net;
  for (int64_t i = 0; i < kBlocks; ++i) net->push_back(Block());
  net->to(at::kDouble);
  tests::give_values_by_name(*net);
  return net;
}

at::Tensor rows_of(double start) {
  return at::arange(kRows * kWidth, at::kDouble)
      .mul(0.11)
      .add(start)
      .sin()
      .view({kRows, kWidth});
}

void train(const std::string& schedule, int64_t chunks) {
  const StartedRanks started;
  auto& world = started.ranks().world();
  Pipe pipe(make_net(), world,
            {.schedule = schedule,
             .num_microbatches = kMicrobatches,
             .loss =
                 [](const at::Tensor& output, const at::Tensor& target) {
                   return torch::mse_loss(output, target);
                 }},
            chunks);
  torch::optim::SGD optimizer(pipe.parameters(), /*lr=*/0.1);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const double loss = pipe.step(rows_of(step), rows_of(step + 0.5)).loss;
    optimizer.step();
    if (world.rank() == 0) std::printf("%.17g\n", loss);
  }
  at::Tensor sum = at::zeros({1}, at::kDouble);
  for (const at::Tensor& each : pipe.parameters()) {
    sum += each.detach().square().sum();
  }
  world.all_reduce(sum).synchronize();
  if (world.rank() == 0) std::printf("%.17g\n", sum.item<double>());
}

}  // namespace

int main(int count, char** arguments) {
  try {
    TS_CHECK_USAGE(count == 3, "pipeline_driver SCHEDULE CHUNKS");
    train(arguments[1], std::stoll(arguments[2]));
  } catch (const std::exception& error) {
    std::cerr << message_of(error) << "\n";
    return 1;
  }
}
