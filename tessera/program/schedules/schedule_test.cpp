#include "tessera/program/schedules/schedule.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/support/programs.h"

namespace tessera::program::schedules {
namespace {

TEST(Schedules, OneStageIsAccumulation) {
  for (int64_t k = 1; k <= 16; ++k) {
    const Program program = accumulation(k);
    EXPECT_EQ(static_cast<int64_t>(program.size()), 5 * k + 5);
    const Proof proof = check(program);
    EXPECT_EQ(proof.num_microbatches, k);
    EXPECT_EQ(proof.peak_alive, 1);
  }
  EXPECT_EQ(describe(accumulation(2, /*clip=*/false)),
            "ZeroGradients\nLoadInputs 0\nForward 0\nLoadTargets 0\nLoss 0\n"
            "Backward 0\nLoadInputs 1\nForward 1\nLoadTargets 1\nLoss 1\n"
            "Backward 1\nNorm\nSumNorm\nOptimizerStep\n");
}

// Figures of the usual example: four stages, eight micro-batches.
TEST(Schedules, ActivationsAlive) {
  const auto alive = [](const char* schedule, int64_t chunks) {
    std::vector<int64_t> peaks;
    const Shape shape{.stages = 4, .chunks = chunks, .num_microbatches = 8};
    for (int64_t stage = 0; stage < 4; ++stage) {
      peaks.push_back(check(step(named(schedule), shape, stage)).peak_alive);
    }
    return peaks;
  };
  using Peaks = std::vector<int64_t>;
  EXPECT_EQ(alive("naive", 1), (Peaks{1, 1, 1, 1}));
  EXPECT_EQ(alive("gpipe", 1), (Peaks{8, 8, 8, 8}));
  EXPECT_EQ(alive("1f1b", 1), (Peaks{4, 3, 2, 1}));
  EXPECT_EQ(alive("eager_1f1b", 1), (Peaks{7, 5, 3, 1}));
  EXPECT_EQ(alive("interleaved", 2), (Peaks{11, 9, 7, 5}));
  EXPECT_EQ(alive("bfs", 2), (Peaks{16, 16, 16, 16}));
}

// For every schedule and a grid of sizes: each stage's program is sound, and
// all come to their end where a send waits for its receive, with messages
// awaited at once and later, and with backwards whole and split.
TEST(Schedules, EverySizeIsSoundAndEnds) {
  const std::vector<passes::Choice> choices = {
      {},
      {.without = {"messages"}},
      {.with = {"split_backward"}},
      {.without = {"messages"}, .with = {"split_backward"}}};
  for (const Schedule& schedule : all()) {
    for (int64_t p = 1; p <= 8; ++p) {
      for (int64_t v = schedule.chunked ? 2 : 1;
           v <= (schedule.chunked ? 4 : 1); ++v) {
        for (int64_t m = 1; m <= 16; ++m) {
          if (schedule.chunked && p == 1) continue;
          if (schedule.multiple_of_stages && m % p != 0) continue;
          const Shape shape{.stages = p, .chunks = v, .num_microbatches = m};
          for (const passes::Choice& choice : choices) {
            EXPECT_NO_THROW(
                check(stages_of(schedule.name, shape, 1, choice).world))
                << schedule.name << " p " << p << " v " << v << " m " << m;
          }
        }
      }
    }
  }
}

// A schedule of the zero-bubble kind: 1F1B whose weight parts come behind the
// next forward, where a stage would wait.
std::vector<Turn> late_weights(const Shape& shape, int64_t stage) {
  std::vector<Turn> turns;
  Turn waiting;
  for (Turn turn : named("1f1b").turns(shape, stage)) {
    Turn next;
    for (Task& task : turn) {
      if (task.op != Op::kBackward) continue;
      task.op = Op::kBackwardInput;
      next.push_back({Op::kBackwardWeight, task.microbatch, task.chunk});
    }
    turn.insert(turn.end(), waiting.begin(), waiting.end());
    waiting = next;
    turns.push_back(turn);
  }
  turns.push_back(waiting);
  return turns;
}

TEST(Schedules, WithSplitBackward) {
  const Schedule schedule{.name = "late_weights", .turns = late_weights};
  for (int64_t p = 1; p <= 4; ++p) {
    const Shape shape{.stages = p, .num_microbatches = 6};
    Stages all = stages_of("1f1b", shape, 2);
    for (int64_t stage = 0; stage < p; ++stage) {
      Units units;
      for (int64_t unit = 0; unit < 2 * p; ++unit) {
        units.all.push_back({.reads = {unit}, .zero_stage = 3});
      }
      units.chunks = {{2 * stage, 2 * stage + 1}};
      all.programs[stage]->program =
          passes::lower(step(schedule, shape, stage), units);
    }
    EXPECT_NO_THROW(check(all.world));
  }
}

}  // namespace
}  // namespace tessera::program::schedules
