// A module and a loop of one's own, whoever starts the ranks: torchrun, mpirun,
// srun, or nobody: then they are two threads of this process.
#include <torch/torch.h>

#include <iostream>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/store.h"
#include "tessera/wrappers/distributed_data_parallel.h"

namespace nn = torch::nn;
namespace ts = tessera;

void train(ts::comm::Communicator& ranks) {
  // torch::manual_seed sets the generator of the process: ranks that are
  // threads share it, and draw their weights one after the other.
  nn::Sequential net{nullptr};
  ts::comm::in_turn(ranks.world(), [&] {
    torch::manual_seed(0);
    net = nn::Sequential(nn::Linear(2, 32), nn::Tanh(), nn::Linear(32, 1));
  });
  // A generator of its own for each rank, which sees data of its own.
  auto random = at::make_generator<at::CPUGeneratorImpl>(ranks.rank());
  ts::DistributedDataParallel model(net, ranks.world());
  torch::optim::Adam optimizer(net->parameters(), /*lr=*/1e-2);

  for (int step = 0; step <= 60; ++step) {
    const auto points = torch::rand({64, 2}, random);
    const auto wanted = points.prod(1, /*keepdim=*/true);
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model.forward(points), wanted);
    loss.backward();  // averages the gradients over the ranks meanwhile
    optimizer.step();
    if (step % 20 != 0) continue;
    at::Tensor mean = loss.detach().clone();
    ranks.world().all_reduce(mean, ts::comm::ReduceOp::kMean).synchronize();
    if (ranks.rank() > 0) continue;
    std::cout << "step " << step << " loss " << mean.item<float>() << "\n";
  }
}

int main() {
  try {
    const auto place = ts::launch::discover(ts::launch::process_variables());
    if (place.source == "none") {
      ts::comm::run_threads(/*world_size=*/2, "shm", train);
      return 0;
    }
    const auto meeting = ts::launch::join(place);
    const auto& here = meeting.environment;
    const ts::comm::CommunicatorOptions options{
        .rank = here.rank,
        .world_size = here.world_size,
        .local_world_size = here.local_world_size,
        .store = meeting.store,
        .address = meeting.address};
    train(*ts::comm::make_communicator(options));
  } catch (const ts::Error& error) {
    std::cerr << ts::message_of(error) << "\n";
    return static_cast<int>(error.exit_code());
  }
}
