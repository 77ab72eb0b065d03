// Seconds and bandwidth of all_reduce among ranks as threads of this process.
//
// Units: bytes_per_second counts the tensor's bytes once a call, whatever the
//        backend moves (algorithm bandwidth).
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include <string>

#include "tessera/comm/communicator.h"

namespace tessera {
namespace {

void all_reduce(benchmark::State& state, const std::string& backend) {
  const int64_t num_ranks = state.range(0);
  const int64_t bytes = state.range(1);
  comm::run_threads(num_ranks, backend, [&](comm::Communicator& ranks) {
    at::Tensor tensor = at::zeros({bytes / 4});
    comm::Group& world = ranks.world();
    world.all_reduce(tensor)
        .synchronize();  // opens what is opened on first use
    world.barrier();
    if (ranks.rank() == 0) {
      for (auto _ : state) world.all_reduce(tensor).synchronize();
    } else {
      for (benchmark::IterationCount i = 0; i < state.max_iterations; ++i) {
        world.all_reduce(tensor).synchronize();
      }
    }
  });
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * bytes);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"ranks", "bytes"})->UseRealTime();
  for (const int64_t ranks : {2, 4}) {
    for (const int64_t bytes : {1 << 10, 1 << 16, 1 << 20, 1 << 24}) {
      bench->Args({ranks, bytes});
    }
  }
}

BENCHMARK_CAPTURE(all_reduce, shm, "shm")->Apply(sizes);
BENCHMARK_CAPTURE(all_reduce, gloo, "gloo")->Apply(sizes);

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
