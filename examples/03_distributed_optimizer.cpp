// Horovod's way, for a loop of one's own under mpirun: a plain module, a plain
// optimizer, and one line that makes its step() average the gradients.
//
//   mpirun -np 2 build/dev/examples/example_03_distributed_optimizer
#include <torch/torch.h>

#include <iostream>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/store.h"
#include "tessera/wrappers/distributed_optimizer.h"

namespace nn = torch::nn;

// The ranks that mpirun started, over MPI.
std::unique_ptr<tessera::comm::Communicator> join_ranks() {
  using namespace tessera::launch;
  const Meeting meeting = join(discover(process_variables()));
  const RankEnvironment& place = meeting.environment;
  return tessera::comm::make_communicator(
      {.backend = "mpi",
       .rank = place.rank,
       .world_size = place.world_size,
       .local_world_size = place.local_world_size,
       .store = meeting.store,
       .timeout = std::chrono::minutes(1)});
}

// Spirals of three colours, interleaved.
std::pair<at::Tensor, at::Tensor> spirals(int64_t count) {
  const auto colour = torch::randint(3, {count});
  const auto radius = torch::rand({count});
  const auto angle = radius * 6 + colour * 2.0944;
  return {torch::stack({radius * angle.cos(), radius * angle.sin()}, 1),
          colour};
}

void train(tessera::comm::Communicator& ranks) {
  at::set_num_threads(1);
  torch::manual_seed(ranks.rank());  // other weights and other data on each
  nn::Sequential net(nn::Linear(2, 64), nn::Tanh(), nn::Linear(64, 64),
                     nn::Tanh(), nn::Linear(64, 3));
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-2));

  // Three lines make a loop for one process one for many.
  tessera::broadcast_parameters(*net, ranks.world());
  tessera::broadcast_optimizer_state(adam, ranks.world());
  tessera::DistributedOptimizer optimizer(
      adam, ranks,
      {.fusion_threshold = 1 << 20,  // bytes
       .cycle_time = std::chrono::milliseconds(1)});

  for (int step = 0; step <= 150; ++step) {
    const auto [points, colours] = spirals(64);
    optimizer.zero_grad();
    at::Tensor loss =
        nn::functional::cross_entropy(net->forward(points), colours);
    loss.backward();   // gradients are reduced while it runs
    optimizer.step();  // with the mean of all ranks
    if (step % 50 != 0) continue;
    at::Tensor mean = loss.detach().clone();
    ranks.world()
        .all_reduce(mean, tessera::comm::ReduceOp::kMean)
        .synchronize();
    if (ranks.rank() == 0) {
      std::cout << "step " << step << " loss " << mean.item<float>() << "\n";
    }
  }
}

int main() {
  try {
    train(*join_ranks());
  } catch (const tessera::Error& error) {
    std::cerr << tessera::message_of(error) << "\n";
    return static_cast<int>(error.exit_code());
  }
}
