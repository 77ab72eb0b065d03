#include "tessera/program/schedules/schedule.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <tuple>

#include "tessera/program/simulator.h"
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
  const auto alive = [](const char* schedule, int64_t chunks, int64_t p = 4,
                        int64_t m = 8) {
    std::vector<int64_t> peaks;
    const Shape shape{.stages = p, .chunks = chunks, .num_microbatches = m};
    for (int64_t stage = 0; stage < p; ++stage) {
      const Schedule of = named(schedule);
      Units units;
      units.versions = versions_of(of, shape.stages, stage);
      const int64_t count = of.delayed ? 3 : 1;
      peaks.push_back(check(steps(of, shape, stage, count), units).peak_alive);
    }
    return peaks;
  };
  using Peaks = std::vector<int64_t>;
  EXPECT_EQ(alive("naive", 1), (Peaks{1, 1, 1, 1}));
  EXPECT_EQ(alive("gpipe", 1, 2, 4), (Peaks{4, 4}));
  EXPECT_EQ(alive("1f1b", 1, 2, 4), (Peaks{2, 1}));
  EXPECT_EQ(alive("gpipe", 1), (Peaks{8, 8, 8, 8}));
  EXPECT_EQ(alive("1f1b", 1), (Peaks{4, 3, 2, 1}));
  EXPECT_EQ(alive("eager_1f1b", 1), (Peaks{7, 5, 3, 1}));
  EXPECT_EQ(alive("interleaved", 2), (Peaks{11, 9, 7, 5}));
  EXPECT_EQ(alive("interleaved", 2, 3, 6), (Peaks{8, 6, 4}));
  EXPECT_EQ(alive("bfs", 2), (Peaks{16, 16, 16, 16}));
  EXPECT_EQ(alive("zb_h1", 1), (Peaks{4, 4, 4, 4}));
  EXPECT_EQ(alive("zb_h2", 1), (Peaks{7, 7, 7, 7}));
  EXPECT_EQ(alive("interleaved_zb", 2), (Peaks{11, 10, 9, 8}));
  EXPECT_EQ(alive("zb_v", 2), (Peaks{8, 8, 8, 8}));
  EXPECT_EQ(alive("dualpipe", 2), (Peaks{5, 5, 5, 5}));
  EXPECT_EQ(alive("dualpipe_v", 2), (Peaks{9, 9, 9, 9}));
  EXPECT_EQ(alive("pipedream_2bw", 1), (Peaks{4, 3, 2, 1}));
}

// Times of a task of a chunk; a whole backward takes its parts'.
struct UnitTimes {
  int64_t forward = 1, input = 1, weight = 1;
  int64_t of(Op op) const {
    return op == Op::kForward         ? forward
           : op == Op::kBackward      ? input + weight
           : op == Op::kBackwardInput ? input
                                      : weight;
  }
};

// What ranks wait, where messages take no time: the longest wait of a rank
// between its first and its last task, and the step's time beyond its work.
// `together`: what a turn makes goes on at its end, and it begins when all that
// it needs is there.
struct Bubble {
  int64_t inside = 0, of_step = 0;
};

Bubble bubble_of(const std::string& name, const Shape& shape,
                 const UnitTimes& times = {}, bool together = false) {
  const Schedule& schedule = named(name);
  const Pipeline pipeline = pipeline_of(schedule, shape);
  std::map<std::tuple<bool, int64_t, int64_t, int64_t>, int64_t> ends;
  struct Rank {
    std::vector<Turn> turns;
    size_t next = 0;
    int64_t first = -1, now = 0, work = 0;
  };
  std::vector<Rank> ranks(shape.stages);
  for (int64_t stage = 0; stage < shape.stages; ++stage) {
    for (const Turn& turn : schedule.turns(shape, stage)) {
      if (together) {
        ranks[stage].turns.push_back(turn);
        continue;
      }
      for (const Task& task : turn) ranks[stage].turns.push_back({task});
    }
  }
  // The end of what a task waits for, if that is known.
  const auto ready = [&](const Task& task,
                         int64_t stage) -> std::optional<int64_t> {
    if (task.op == Op::kBackwardWeight) return 0;
    const bool forward = task.op == Op::kForward;
    const Place here{stage, task.chunk};
    auto from = forward ? pipeline.before(here) : pipeline.behind(here);
    if (!from && forward) return 0;
    const bool of_forward = forward || !from;
    if (!from) from = here;
    const auto found =
        ends.find({of_forward, task.microbatch, from->stage, from->chunk});
    if (found == ends.end()) return std::nullopt;
    return found->second;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t stage = 0; stage < shape.stages; ++stage) {
      Rank& rank = ranks[stage];
      while (rank.next < rank.turns.size()) {
        std::optional<int64_t> start = rank.now;
        for (const Task& task : rank.turns[rank.next]) {
          const auto at = ready(task, stage);
          start = at && start ? std::max(*start, *at) : at;
          if (!at) break;
        }
        if (!start) break;
        if (rank.first < 0) rank.first = *start;
        int64_t length = 0;
        for (const Task& task : rank.turns[rank.next]) {
          length += times.of(task.op);
        }
        rank.now = *start + length;
        rank.work += length;
        for (const Task& task : rank.turns[rank.next++]) {
          if (task.op == Op::kBackwardWeight) continue;
          ends[{task.op == Op::kForward, task.microbatch, stage, task.chunk}] =
              rank.now;
        }
        moved = true;
      }
    }
  }
  Bubble bubble;
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.next, rank.turns.size()) << name << " does not end";
    bubble.inside = std::max(bubble.inside, rank.now - rank.first - rank.work);
    bubble.of_step = std::max(bubble.of_step, rank.now - rank.work);
  }
  return bubble;
}

// As the papers have them.
TEST(Schedules, Bubbles) {
  for (int64_t p = 2; p <= 8; ++p) {
    for (const int64_t m : {2 * p, 3 * p, 4 * p}) {
      const auto shape = [&](int64_t v) {
        return Shape{.stages = p, .chunks = v, .num_microbatches = m};
      };
      for (const UnitTimes& t : {UnitTimes{1, 1, 1}, UnitTimes{2, 3, 2},
                                 UnitTimes{3, 4, 2}, UnitTimes{4, 5, 3}}) {
        const int64_t f = t.forward, b = t.input, w = t.weight;
        const auto where = c10::str(" p ", p, " m ", m, " ", f, b, w);
        EXPECT_EQ(bubble_of("1f1b", shape(1), t).of_step, (p - 1) * (f + b + w))
            << where;
        EXPECT_EQ(bubble_of("zb_h1", shape(1), t).of_step,
                  (p - 1) * (f + b - w))
            << where;
        EXPECT_EQ(bubble_of("zb_h2", shape(1), t).inside,
                  (p - 1) * (f + b - 2 * w))
            << where;
        for (const int64_t v : {2, 3, 4}) {
          EXPECT_EQ(bubble_of("interleaved_zb", shape(v), t).of_step,
                    (p - 1) * (f + b - w))
              << where << " v " << v;
        }
        if (f != b || f != w) continue;
        EXPECT_EQ(bubble_of("dualpipe_v", shape(2), t, true).inside,
                  (p - 1) * (f + 2 * b - w))
            << where;
        if (p % 2 == 0) {
          EXPECT_EQ(bubble_of("dualpipe", shape(2), t, true).inside,
                    (p / 2 - 1) * (f + 2 * b - w))
              << where;
        }
      }
      EXPECT_EQ(bubble_of("zb_v", shape(2)).inside, 0) << " p " << p;
      EXPECT_EQ(bubble_of("dualpipe_v", shape(2)).inside, p - 1) << " p " << p;
      if (p % 2 == 0) {
        EXPECT_EQ(bubble_of("dualpipe", shape(2)).inside, p / 2 - 1) << p;
      }
    }
  }
}

// Each run lies at one place, of each replica, beside its neighbours.
TEST(Placement, IsItsOwnInverse) {
  for (const auto placement :
       {Placement::kRoundRobin, Placement::kV, Placement::kMirrored}) {
    for (int64_t p = 1; p <= 6; ++p) {
      const bool mirrored = placement == Placement::kMirrored;
      for (int64_t v = mirrored ? 2 : 1; v <= (mirrored ? 2 : 4); ++v) {
        const Pipeline pipeline{p, v, placement};
        std::map<int64_t, int64_t> held;
        for (int64_t stage = 0; stage < p; ++stage) {
          for (int64_t chunk = 0; chunk < v; ++chunk) {
            const Place here{stage, chunk};
            const int64_t run = pipeline.run_of(here);
            ++held[run];
            EXPECT_EQ(pipeline.place_of(run, chunk), here);
            EXPECT_EQ(pipeline.is_first(here), !pipeline.before(here));
            EXPECT_EQ(pipeline.is_last(here), !pipeline.behind(here));
            if (const auto next = pipeline.behind(here)) {
              EXPECT_EQ(pipeline.run_of(*next), run + 1);
              EXPECT_EQ(pipeline.before(*next), here);
              const bool turns =
                  placement == Placement::kV && next->chunk != chunk;
              EXPECT_EQ(next->stage == stage, turns || p == 1);
            }
          }
        }
        EXPECT_EQ(static_cast<int64_t>(held.size()), pipeline.num_runs());
        for (const auto& [run, count] : held)
          EXPECT_EQ(count, mirrored ? 2 : 1);
      }
    }
  }
}

// Worked example 7, whose stages are counted from one.
TEST(Placement, OfTheUsualExample) {
  const auto of_stage = [](const Pipeline& pipeline, int64_t stage) {
    return std::vector<int64_t>{pipeline.run_of({stage, 0}) + 1,
                                pipeline.run_of({stage, 1}) + 1};
  };
  using Two = std::vector<int64_t>;
  const Pipeline round{3, 2, Placement::kRoundRobin}, v{2, 2, Placement::kV};
  EXPECT_EQ(of_stage(round, 0), (Two{1, 4}));
  EXPECT_EQ(of_stage(round, 1), (Two{2, 5}));
  EXPECT_EQ(of_stage(round, 2), (Two{3, 6}));
  EXPECT_EQ(of_stage(v, 0), (Two{1, 4}));
  EXPECT_EQ(of_stage(v, 1), (Two{2, 3}));
}

// The proof of a step grows with its instructions alone.
TEST(Schedules, LargeOnesAreProvenToo) {
  for (const char* name : {"zb_h1", "zb_v", "dualpipe"}) {
    const Shape shape{.stages = 64,
                      .chunks = usual_chunks(named(name)),
                      .num_microbatches = 256};
    EXPECT_NO_THROW(check(stages_of(name, shape).world)) << name;
  }
}

// Steps that go on are a first, some that are alike, and a last, however many
// there are together: what was proven of some is so of all.
TEST(Schedules, StepsThatGoOnAreAlike) {
  for (const passes::Choice& choice :
       {passes::Choice{}, {.without = {"messages"}}}) {
    for (int64_t p = 1; p <= 5; ++p) {
      for (int64_t m = p; m <= 2 * p + 1; ++m) {
        const Shape shape{.stages = p, .num_microbatches = m};
        const auto cut = [&](int64_t count, int64_t stage) {
          const Stages all =
              stages_of("pipedream_2bw", shape, 2, choice, count);
          return steps_of(all.programs[stage]->program, m);
        };
        for (int64_t stage = 0; stage < p; ++stage) {
          const auto two = cut(2, stage), four = cut(4, stage);
          const auto five = cut(5, stage);
          ASSERT_EQ(five.size(), 5U);
          EXPECT_EQ(two[0], five[0]);
          EXPECT_EQ(two[1], five[4]);
          EXPECT_EQ(four[1], five[1]);
          for (const size_t i : {2, 3}) EXPECT_EQ(five[i], five[1]);
          if (p == 1) {
            EXPECT_EQ(five[0], cut(1, stage)[0]);
          }
        }
      }
    }
  }
}

// In between a stage waits for none, whatever forwards and backwards take: the
// norm of a step is known when it is asked for.
TEST(Schedules, StepsThatGoOnHaveNoBubble) {
  for (int64_t p = 2; p <= 6; ++p) {
    for (int64_t m = p; m <= 2 * p; ++m) {
      for (const UnitTimes& t : {UnitTimes{1, 1, 1}, UnitTimes{1, 0, 1},
                                 UnitTimes{2, 3, 2}, UnitTimes{3, 1, 0}}) {
        const int64_t steps = 6;
        const Stages all =
            stages_of("pipedream_2bw", {.stages = p, .num_microbatches = m}, 1,
                      {}, steps);
        for (const auto& each : all.programs) {
          each->between_steps.clear();
          each->norm = {{"all_reduce", 0, at::kDouble, 1}};
        }
        const auto work = [&](int64_t, const Instruction& each) {
          return is_compute(each.op) ? static_cast<double>(t.of(each.op)) : 0.;
        };
        const auto simulation = simulate(all.world, {.work = work});
        for (const auto& rank : simulation.classes) {
          const StepEnd &from = rank.step_ends[2], &to = rank.step_ends[4];
          EXPECT_EQ(to.bubble, from.bubble) << "p " << p << " m " << m;
          EXPECT_EQ(to.time - from.time,
                    2. * m * (t.forward + t.input + t.weight));
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
