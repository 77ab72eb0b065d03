// Bubbles as ranks have them beside those that the simulator says: stages that
// sleep for fixed times, a thread each, so that few cores act as many devices.
// All that is between them is here as it is in a run: programs, lanes, waits.
//
// Units: milliseconds of a step; bubbles are shares of it; bubble_off is the
//        measured bubble over the predicted one, less one.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <barrier>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "bench/sleeping.h"
#include "tessera/program/schedules/equal_stages.h"

namespace tessera::program {
namespace {

using bench::Clock;
using bench::Milliseconds;
// Virtual stage that receives, whether activations, rank there, micro-batch.
using Key = std::tuple<int64_t, bool, int64_t, int64_t>;
using Post = bench::Post<Key>;

// A rank whose units sleep.
class Sleeper : public bench::Sleeper<Key> {
 public:
  Sleeper(const RankProgram& of, const Times& times_ms, Post& post,
          std::barrier<>& all)
      : bench::Sleeper<Key>(post, all), of_(of), times_(times_ms) {}

  const Program& program() const { return of_.program; }
  double worked_ms() const { return worked_ms_; }

 private:
  void sleep(const Instruction& each) override {
    if (each.op == Op::kLoss) return;
    const auto begin = Clock::now();
    std::this_thread::sleep_until(begin +
                                  std::chrono::duration_cast<Clock::duration>(
                                      Milliseconds(time_of(each.op, times_))));
    worked_ms_ += Milliseconds(Clock::now() - begin).count();
  }

  Key key_of(const Instruction& message) const override {
    const Ends ends = ends_of(message, of_.stage, of_.stages, of_.placement);
    return {ends.receiver, ends.activations,
            ends.sends ? ends.peer_stage : of_.stage, message.microbatch};
  }

  const RankProgram& of_;
  const Times times_;
  double worked_ms_ = 0;
};

struct Measured {
  double step_ms = 0, bubble = 0;
};

Measured run(const std::vector<RankProgram>& programs, const Times& times_ms) {
  const auto size = std::ssize(programs);
  Post post;
  std::barrier<> all(size);
  std::vector<Sleeper> ranks;
  ranks.reserve(programs.size());
  for (const auto& each : programs)
    ranks.emplace_back(each, times_ms, post, all);
  Measured measured{.step_ms = bench::together_ms(size, [&](int64_t rank) {
                      execute(ranks[rank].program(), ranks[rank]);
                    })};
  double worked = 0;
  for (const auto& rank : ranks) worked += rank.worked_ms();
  measured.bubble = 1 - worked / (static_cast<double>(size) * measured.step_ms);
  return measured;
}

// Of its steps the fastest, which nothing else on the machine held up.
void sleep_through_a_step(benchmark::State& state, const std::string& name,
                          int64_t chunks) {
  const auto& schedule = schedules::named(name);
  const schedules::Shape shape{.stages = state.range(0),
                               .chunks = chunks,
                               .num_microbatches = state.range(1)};
  const int64_t count = schedule.delayed ? schedules::kStepsTogether : 1;
  const auto programs =
      schedules::programs_of(schedule, shape, /*lowered=*/true, count);
  const int64_t passes =
      schedules::pipeline_of(schedule, shape).num_runs() / shape.stages;
  const auto whole_ms = static_cast<double>(state.range(2));
  const double ms = whole_ms / static_cast<double>(passes);
  const Times times{ms, ms, ms};
  std::vector<Measured> steps;
  for (auto _ : state) {
    steps.push_back(run(programs, times));
    state.SetIterationTime(steps.back().step_ms / 1e3);
  }
  const double measured =
      std::ranges::min_element(steps, {}, &Measured::step_ms)->bubble;
  const auto predicted =
      schedules::simulate(schedule, shape, {whole_ms, whole_ms, whole_ms},
                          /*message=*/0, /*lowered=*/true, count);
  state.counters["predicted_ms"] = predicted.step;
  state.counters["bubble"] = measured;
  state.counters["predicted"] = predicted.bubble();
  state.counters["bubble_off"] = measured / predicted.bubble() - 1;
}

void add_benches() {
  for (const auto& schedule : schedules::all()) {
    const int64_t chunks = schedule.chunked ? 2 : 1;
    for (const auto& [p, m] : {std::pair(4, 8), std::pair(8, 16)}) {
      const schedules::Shape shape{
          .stages = p, .chunks = chunks, .num_microbatches = m};
      if (!schedules::takes(schedule, shape)) continue;
      if (schedule.name == "naive" && p > 4) continue;  // 8 s a step
      benchmark::RegisterBenchmark(
          schedule.name.c_str(),
          [name = schedule.name, chunks](benchmark::State& state) {
            sleep_through_a_step(state, name, chunks);
          })
          ->ArgNames({"p", "m", "ms"})
          ->Args({p, m, 20})
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
}

}  // namespace
}  // namespace tessera::program

int main(int argc, char** argv) {
  tessera::program::add_benches();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
