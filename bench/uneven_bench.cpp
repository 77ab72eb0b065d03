// Steps of ranks of which one is half as fast, cut evenly and by mesh.speeds:
// ranks that sleep for as long as their operations take at their speed, a
// thread each, so that few cores act as many devices. Programs, samples and
// layers are those of a run; collectives take no time, but for the end of a
// step, at which all ranks meet.
//
// even_ms, by_layers_ms, by_facts_ms: milliseconds of a step, even and with
// speeds, by pipeline.cut layers and facts; gain: even over the best of the
// others; predicted: the simulator's gain.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "bench/sleeping.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/step_plan.h"
#include "tessera/engine/step_programs.h"
#include "tessera/models/model.h"
#include "tessera/parallel/compose.h"

namespace tessera::engine {
namespace {

using bench::Clock;
using Seconds = std::chrono::duration<double>;
using mesh::Axis;
using program::Instruction;
// Sender, receiver, whether activations, micro-batch and virtual stage there.
using Key = std::tuple<int64_t, int64_t, bool, int64_t, int64_t>;
using Post = bench::Post<Key>;

// All ranks of a configuration, and what their instructions take.
class Ranks {
 public:
  Ranks(const RunConfig& config, const program::Device& device)
      : config_(config), mesh_(mesh_of(config, implied_world_size(config))) {
    const auto model = models::make_model(config.model);
    parallel::place(*model, mesh_, config);
    const auto units = parallel::model_units(*model, mesh_, config);
    for (int64_t rank = 0; rank < mesh_.world_size(); ++rank) {
      const mesh::Coord coord = mesh_.coord_of(rank);
      programs_.push_back(lowered_program(
          config, mesh_, units, coord[Axis::kPp], program::Purpose::kTraining));
      facts_.push_back(
          {facts_of(config, mesh_, coord), units.units_of(mesh_, rank)});
    }
    work_ = program::work_of_device(
        device, [this](int64_t rank) -> const program::RankFacts& {
          return facts_.at(rank);
        });
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int64_t size() const { return mesh_.world_size(); }
  const program::Program& program_of(int64_t rank) const {
    return programs_.at(rank);
  }
  Seconds time_of(int64_t rank, const Instruction& each) const {
    return Seconds(work_(rank, each) / config_.mesh.speed_of(rank));
  }
  Key key_of(int64_t rank, const Instruction& message) const {
    mesh::Coord other = mesh_.coord_of(rank);
    const auto ends =
        program::ends_of(message, other[Axis::kPp], mesh_.degree(Axis::kPp),
                         config_.pipeline.placement());
    other[Axis::kPp] = ends.peer_stage;
    const int64_t peer = mesh_.rank_at(other);
    return {ends.sends ? rank : peer, ends.sends ? peer : rank,
            ends.activations, message.microbatch, ends.receiver};
  }

 private:
  const RunConfig& config_;
  const mesh::DeviceMesh mesh_;
  std::vector<program::Program> programs_;
  std::vector<program::RankFacts> facts_;
  program::Work work_;
};

class Sleeper : public bench::Sleeper<Key> {
 public:
  Sleeper(const Ranks& ranks, int64_t rank, Post& post, std::barrier<>& end)
      : bench::Sleeper<Key>(post, end), ranks_(ranks), rank_(rank) {}

 private:
  // Until it should be done: what oversleeps is made up for.
  void sleep(const Instruction& each) override {
    done_ = std::max(done_, Clock::now() - kLag) +
            std::chrono::duration_cast<Clock::duration>(
                ranks_.time_of(rank_, each));
    std::this_thread::sleep_until(done_);
  }
  Key key_of(const Instruction& message) const override {
    return ranks_.key_of(rank_, message);
  }

  static constexpr std::chrono::microseconds kLag{200};
  const Ranks& ranks_;
  const int64_t rank_;
  Clock::time_point done_ = Clock::now();
};

double step_ms(const Ranks& ranks) {
  Post post;
  std::barrier<> end(ranks.size());
  return bench::together_ms(ranks.size(), [&](int64_t rank) {
    Sleeper sleeper(ranks, rank, post, end);
    program::execute(ranks.program_of(rank), sleeper);
  });
}

struct Mesh {
  int64_t pp = 1, dp = 1;
};

// Of which the last rank is half as fast.
RunConfig on(const Mesh& mesh, const std::string& cut) {
  constexpr int64_t kMicrobatches = 8;
  RunConfig config;
  config.model = {.family = "llama",
                  .layers = 24,
                  .hidden = 256,
                  .heads = 4,
                  .kv_heads = 4,
                  .ffn = 704,
                  .vocab = 2048,
                  .max_seq = 128};
  config.data.train = {"any text"};
  config.data.seq_len = 128;
  config.mesh.pp = mesh.pp;
  config.mesh.dp_replicate = mesh.dp;
  config.batch.micro = 6;
  config.batch.global = config.batch.micro * kMicrobatches * mesh.dp;
  config.mesh.speeds.assign(mesh.pp * mesh.dp, 1.0);
  config.mesh.speeds.back() = 0.5;
  config.pipeline.cut = cut;
  complete(config, mesh.pp * mesh.dp);
  return config;
}

RunConfig evenly(RunConfig config) {
  config.pipeline.split.clear();
  config.batch.rows.clear();
  return config;
}

constexpr program::Device kDevice{.flops = 1e12};

double predicted(const RunConfig& config) {
  PlanCosts costs;
  costs.device = kDevice;
  return plan_step(config, costs).step;
}

void sleep_through_steps(benchmark::State& state, const Mesh& mesh) {
  const RunConfig by_layers = on(mesh, "layers"), by_facts = on(mesh, "facts");
  const RunConfig even = evenly(by_layers);
  struct Way {
    const char* name;
    const RunConfig& config;
    Ranks ranks{config, kDevice};
    // The fastest, which nothing else on the machine held up.
    double ms = std::numeric_limits<double>::infinity();
  };
  Way ways[] = {{"even_ms", even},
                {"by_layers_ms", by_layers},
                {"by_facts_ms", by_facts}};
  for (auto _ : state) {
    double all_ms = 0;
    for (Way& way : ways) {
      const double ms = step_ms(way.ranks);
      way.ms = std::min(way.ms, ms);
      all_ms += ms;
    }
    state.SetIterationTime(all_ms / 1e3);
  }
  for (const Way& way : ways) state.counters[way.name] = way.ms;
  state.counters["gain"] = ways[0].ms / std::min(ways[1].ms, ways[2].ms);
  state.counters["predicted"] =
      predicted(even) / std::min(predicted(by_layers), predicted(by_facts));
}

void add_benches() {
  for (const Mesh& mesh : {Mesh{2, 1}, {3, 1}, {4, 1}, {1, 2}, {2, 2}}) {
    benchmark::RegisterBenchmark(
        c10::str("one_of_two_speeds/pp:", mesh.pp, "/dp:", mesh.dp).c_str(),
        [mesh](benchmark::State& state) { sleep_through_steps(state, mesh); })
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
}

}  // namespace
}  // namespace tessera::engine

int main(int argc, char** argv) {
  tessera::engine::add_benches();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
