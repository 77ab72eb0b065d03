// DataParallel: one process, four worker threads around device 0, and the bytes
// that this costs.
//
// The worked example: Linear(10, 1), 64 samples a step, of which each device
// gets 16; the loss is computed on device 0.
#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <iostream>

#include "tessera/wrappers/data_parallel.h"

int main() {
  at::manual_seed(0);
  const at::Tensor slope = at::randn({10, 1});
  torch::nn::Linear net(10, 1);
  tessera::DataParallel model(net, tessera::cpu_devices(4));
  torch::optim::SGD optimizer(net->parameters(), /*lr=*/0.01);

  constexpr int kSteps = 400;
  double loss_of_step = 0;
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor inputs = at::randn({64, 10});
    const at::Tensor loss =
        at::mse_loss(model.forward(inputs), inputs.mm(slope) + 1);
    optimizer.zero_grad();
    loss.backward();  // on all devices; the sums arrive in net's parameters
    optimizer.step();
    loss_of_step = loss.item<double>();
    if (step % 100 == 0)
      std::cout << "step " << step << " loss " << loss_of_step << "\n";
  }

  std::cout << "device  bytes of the model a step, in and out\n";
  for (size_t device = 0; device < model.traffic().size(); ++device) {
    const auto& traffic = model.traffic()[device];
    std::cout << device << "       " << traffic.model_in / kSteps << "  "
              << traffic.model_out / kSteps << "\n";
  }
  return loss_of_step < 1e-3 ? 0 : 1;
}
