// What it costs to observe a step: the clock read twice and a span for each
// instruction, and the timeline of them all.
//
// Units: items are instructions; divide a step's seconds by their number to see
//        the share (`train --dry-run` prints a program, traces count spans).
#include <benchmark/benchmark.h>

#include <chrono>

#include "tessera/engine/recorder.h"
#include "tessera/monitor/timeline.h"

namespace tessera {
namespace {

using program::Instruction;
using program::Op;
using program::Phase;

double now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// As ZeRO 3 has them, which says most: a gather around each forward and
// backward, a reduction behind.
std::vector<Instruction> step_of(int64_t units, int64_t microbatches) {
  std::vector<Instruction> step;
  const auto both = [&](Instruction instruction) {
    for (const Phase phase : {Phase::kBegin, Phase::kAwait}) {
      instruction.phase = phase;
      step.push_back(instruction);
    }
  };
  for (int64_t microbatch = 0; microbatch < microbatches; ++microbatch) {
    for (const Op op : {Op::kForward, Op::kBackward}) {
      for (int64_t unit = 0; unit < units; ++unit) {
        both({.op = Op::kGatherParameters, .unit = unit});
        step.push_back({.op = op, .microbatch = microbatch, .unit = unit});
        if (op == Op::kForward) continue;
        both({.op = Op::kReduceGradients, .unit = unit});
      }
    }
  }
  return step;
}

void observe_a_step(benchmark::State& state) {
  const auto step = step_of(state.range(0), state.range(1));
  parallel::Composed composed;
  composed.units.all.resize(state.range(0));
  engine::Recorder recorder(composed, 0);
  const auto observe = recorder.observer();
  for (auto _ : state) {
    recorder.begin_step(1);
    const double begin = now();
    double last = begin;
    for (const Instruction& instruction : step) {
      const double before = now();
      observe(instruction, before, last = now());
    }
    benchmark::DoNotOptimize(
        monitor::timeline_of(recorder.spans(), last - begin));
  }
  state.counters["instructions"] = static_cast<double>(step.size());
  state.SetItemsProcessed(state.iterations() *
                          static_cast<int64_t>(step.size()));
}

BENCHMARK(observe_a_step)
    ->ArgNames({"units", "microbatches"})
    ->Args({10, 1})
    ->Args({10, 8})
    ->Args({82, 64});

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
