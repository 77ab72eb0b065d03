// Two ranks, as threads of this process, add up their numbers.
#include <ATen/ATen.h>
#include <tessera/comm/communicator.h>
#include <tessera/core/version.h>

#include <iostream>

int main() {
  tessera::comm::run_threads(2, "shm", [](tessera::comm::Communicator& peers) {
    at::Tensor mine = at::full({4}, static_cast<double>(peers.rank() + 1));
    peers.world().all_reduce(mine).synchronize();
    if (peers.rank() == 0) {
      std::cout << "tessera " << tessera::kVersion << " on LibTorch "
                << tessera::kTorchVersion
                << ": 1 + 2 = " << mine[0].item<double>() << "\n";
    }
  });
}
