// What it costs to simulate a step: programs of many stages and micro-batches,
// lowered before.
//
// Units: items are instructions of all ranks together.
#include <benchmark/benchmark.h>

#include "tessera/program/schedules/equal_stages.h"

namespace tessera::program {
namespace {

void simulate_a_step(benchmark::State& state, const char* schedule) {
  const schedules::Shape shape{.stages = state.range(0),
                               .num_microbatches = state.range(1)};
  const auto programs =
      schedules::programs_of(schedules::named(schedule), shape);
  int64_t instructions = 0;
  for (const auto& each : programs) instructions += std::ssize(each.program);
  const Costs costs{
      .work = [](int64_t,
                 const Instruction& each) { return time_of(each.op, Times{}); },
      .links = {{.latency = 0.1}}};
  for (auto _ : state) {
    benchmark::DoNotOptimize(schedules::simulate(programs, costs));
  }
  state.counters["instructions"] = static_cast<double>(instructions);
  state.SetItemsProcessed(state.iterations() * instructions);
}

BENCHMARK_CAPTURE(simulate_a_step, 1f1b, "1f1b")
    ->ArgNames({"stages", "microbatches"})
    ->Args({8, 64})
    ->Args({64, 256})
    ->Args({64, 1600})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(simulate_a_step, zb_h1, "zb_h1")
    ->ArgNames({"stages", "microbatches"})
    ->Args({64, 256})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera::program

BENCHMARK_MAIN();
