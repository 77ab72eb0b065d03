// What it costs that ranks compare what they have called (histories.h): small
// all_reduces over Gloo, on a group that compares and on one that does not, by
// turns of 1280 calls; ranks as threads of this process.
//
// plain_us, compared_us: microseconds a call, the mean of all turns; ratio: the
// second over the first.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>

#include "tessera/comm/base/backend_group.h"
#include "tessera/comm/base/rendezvous.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/gloo/gloo_backend.h"

namespace tessera::comm {
namespace {

constexpr int kCalls = 1280;

double seconds_of_turn(Group& group, at::Tensor& tensor) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) group.all_reduce(tensor).wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

void compare_histories(benchmark::State& state) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::chrono::seconds timeout(60);
  const int64_t num_ranks = state.range(0);
  double plain = 0, compared = 0;
  run_threads(num_ranks, "gloo", [&](Communicator& ranks) {
    const auto rank = static_cast<int>(ranks.rank());
    BackendGroup without(
        {.name = "plain",
         .backend = "gloo",
         .ranks = ranks.world().ranks(),
         .rank = rank,
         .timeout = timeout},
        gloo::make_gloo_backend(Rendezvous(store, "plain/"),
                                {.rank = rank,
                                 .size = static_cast<int>(num_ranks),
                                 .address = "127.0.0.1",
                                 .timeout = timeout}));
    at::Tensor tensor = at::zeros({state.range(1) / 4});
    const auto both_turns = [&] {
      const double first = seconds_of_turn(without, tensor);
      const double second = seconds_of_turn(ranks.world(), tensor);
      if (rank != 0) return;
      plain += first;
      compared += second;
    };
    if (rank == 0) {
      for (auto _ : state) both_turns();
    } else {
      for (benchmark::IterationCount i = 0; i < state.max_iterations; ++i) {
        both_turns();
      }
    }
  });
  const double calls = kCalls * static_cast<double>(state.iterations());
  state.counters["plain_us"] = plain / calls * 1e6;
  state.counters["compared_us"] = compared / calls * 1e6;
  state.counters["ratio"] = compared / plain;
}

BENCHMARK(compare_histories)
    ->ArgNames({"ranks", "bytes"})
    ->Args({2, 4})
    ->Args({2, 1 << 16})
    ->Args({4, 4})
    ->UseRealTime();

}  // namespace
}  // namespace tessera::comm

BENCHMARK_MAIN();
