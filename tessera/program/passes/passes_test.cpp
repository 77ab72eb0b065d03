#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "tessera/program/executor.h"
#include "tests/support/programs.h"

namespace tessera::program {
namespace {

// In short words: B2.1 is the backward of micro-batch 2 through unit 1; "<" and
// ">" begin and await.
class RecordingActor : public Actor {
 public:
  std::string calls;
  void zero_gradients() override { calls += "Z "; }
  void load_inputs(int64_t m) override { add("Li", m); }
  void load_targets(int64_t m) override { add("Lt", m); }
  void load_documents(int64_t m) override { add("Ld", m); }
  void forward(int64_t m, int64_t unit) override { add("F", m, unit); }
  void recompute(int64_t m, int64_t unit) override { add("A", m, unit); }
  void replay(int64_t m, int64_t unit) override { add("P", m, unit); }
  void loss(int64_t m) override { add("L", m); }
  void backward(Op part, int64_t m, int64_t unit) override {
    add(part == Op::kBackward        ? "B"
        : part == Op::kBackwardInput ? "I"
                                     : "W",
        m, unit);
  }
  void begin(const Instruction& each, bool /*awaited_next*/) override {
    add("<" + letter(each), each);
  }
  void await(const Instruction& each) override {
    add(">" + letter(each), each);
  }
  void free_parameters(int64_t unit) override { add("f", unit); }
  void allocate_gradients(int64_t unit) override { add("a", unit); }
  void norm() override { calls += "N "; }
  void clip_gradients() override { calls += "C "; }
  void optimizer_step(int64_t unit) override { add("O", unit); }
  void replicate_parameters() override { calls += "R* "; }
  void reduce_replicas() override { calls += "S* "; }

 private:
  static std::string letter(const Instruction& each) {
    switch (each.op) {
      case Op::kGatherParameters:
        return "G";
      case Op::kReduceGradients:
        return "R";
      case Op::kSumGradients:
        return "S";
      case Op::kSumNorm:
        return "N";
      case Op::kShareBatch:
        return "D";
      case Op::kSendActivations:
        return "sa";
      case Op::kReceiveActivations:
        return "ra";
      case Op::kSendGradients:
        return "sg";
      default:
        return "rg";
    }
  }
  void add(const std::string& name, const Instruction& each) {
    if (is_message(each.op)) return add(name, each.microbatch);
    each.unit < 0 ? add(name, -1) : add(name, each.unit);
  }
  void add(const std::string& name, int64_t m, int64_t unit = -1) {
    calls += name;
    if (m >= 0) calls += std::to_string(m);
    if (unit >= 0) calls += "." + std::to_string(unit);
    calls += " ";
  }
};

std::string calls_of(const Program& program) {
  RecordingActor actor;
  execute(program, actor);
  return actor.calls;
}

const std::vector<std::string> kAtOnce = {"prefetch", "reductions", "messages"};

TEST(Executor, CallsWhatTheProgramSays) {
  RecordingActor actor;
  size_t observed = 0;
  const Program program = lowered(2, {});
  execute(program, actor,
          [&](const Instruction& instruction, double begin, double end) {
            EXPECT_EQ(instruction, program[observed++]);
            EXPECT_GE(end, begin);
          });
  EXPECT_EQ(actor.calls, "Z Li0 F0 Lt0 L0 B0 Li1 F1 Lt1 L1 B1 N <N >N C O ");
  EXPECT_EQ(observed, program.size());
}

TEST(Passes, ShardingByStage) {
  const auto calls = [](const Units& units) {
    return calls_of(lowered(1, units, kAtOnce));
  };
  EXPECT_EQ(
      calls(units_of(2, 0)),
      "Z Li0 F0.0 F0.1 Lt0 L0 B0.1 <R1 >R1 B0.0 <R0 >R0 N <N >N C O0 O1 ");
  EXPECT_EQ(
      calls(units_of(2, 1)),
      "Z Li0 <G0 >G0 F0.0 <G1 >G1 F0.1 Lt0 L0 B0.1 <R1 >R1 B0.0 <R0 >R0 N "
      "<N >N C O0 O1 ");
  EXPECT_EQ(calls(units_of(2, 3)),
            "Z Li0 <G0 >G0 F0.0 f0 <G1 >G1 F0.1 f1 Lt0 <G1 >G1 a1 L0 B0.1 <R1 "
            ">R1 f1 <G0 >G0 a0 B0.0 <R0 >R0 f0 N <N >N C O0 O1 ");
}

// Each pass moves its own instructions alone.
TEST(Passes, WhatIsMovedWhere) {
  Units units = units_of(3, 3);
  const auto without = [&](std::vector<std::string> names) {
    return calls_of(lowered(1, units, names));
  };
  EXPECT_EQ(without({"reductions", "messages"}),
            "<G0 Z Li0 >G0 <G1 F0.0 f0 >G1 <G2 F0.1 f1 >G2 F0.2 f2 <G2 Lt0 "
            ">G2 a2 L0 <G1 B0.2 <R2 >R2 f2 >G1 a1 <G0 B0.1 <R1 >R1 f1 >G0 a0 "
            "B0.0 <R0 >R0 f0 N <N >N C O0 O1 O2 ");
  units = units_of(3, 2);
  EXPECT_EQ(
      without({"prefetch", "messages"}),
      "Z Li0 <G0 >G0 F0.0 <G1 >G1 F0.1 <G2 >G2 F0.2 Lt0 a2 L0 B0.2 <R2 a1 "
      "B0.1 >R2 <R1 a0 B0.0 >R1 <R0 >R0 N <N >N C O0 O1 O2 ");
}

// From before the first load to behind the last update.
TEST(Passes, TheNextBatchTravelsAllTheWhile) {
  Units units = units_of(1, 0);
  units.shares_batch = true;
  EXPECT_EQ(calls_of(lowered(1, units)),
            "<D Z Li0 F0.0 Lt0 L0 B0.0 <R0 >R0 N <N >N C O0 >D ");
}

// In a late stage of a pipeline nothing else is done before its first
// activations come: the gathers of its first units begin before that, of a unit
// that has two parts, as experts have, both.
TEST(Passes, GathersDoNotWaitForActivations) {
  const auto calls = [](int64_t zero, int64_t ahead) {
    Units units = units_of(3, zero);
    units.all.push_back(units.all[1]);
    units.all[1].reads.push_back(3);
    units.chunks = {{1, 2}};
    units.prefetch = ahead;
    const schedules::Shape shape{.stages = 2};
    return calls_of(passes::lower(
        schedules::step(schedules::named("1f1b"), shape, 1, {}), units));
  };
  using ::testing::StartsWith;
  for (const int64_t zero : {1, 3}) {
    EXPECT_THAT(calls(zero, 1),
                StartsWith("<G1 <G3 Z <ra0 >ra0 >G1 >G3 <G2 F"));
    EXPECT_THAT(calls(zero, 2),
                StartsWith("<G1 <G3 <G2 Z <ra0 >ra0 >G1 >G3 F"));
  }
}

TEST(Passes, PrefetchKeepsToItsBudget) {
  Units units = units_of(6, 3);
  for (int64_t prefetch = 0; prefetch <= 3; ++prefetch) {
    units.prefetch = prefetch;
    units.prefetch_bytes = INT64_MAX;
    EXPECT_EQ(check(lowered(2, units), units).peak_gathered, prefetch + 1);
    units.prefetch_bytes = 200;
    EXPECT_EQ(check(lowered(2, units), units).peak_gathered,
              std::min<int64_t>(prefetch, 1) + 1);
  }
}

TEST(Passes, RecomputationAndSplitBackward) {
  Units units = units_of(3, 0);
  for (auto& unit : units.all) unit.reduced = false;
  units.all[1].recomputed_from = 1;
  EXPECT_EQ(calls_of(lowered(1, units)),
            "Z Li0 F0.0 F0.1 F0.2 Lt0 L0 B0.2 A0.1 B0.1 B0.0 N <N >N C O0 O1 "
            "O2 ");
  const Program split = passes::lower(
      accumulation(1), units, Purpose::kTraining, {.with = {"split_backward"}});
  EXPECT_EQ(calls_of(split),
            "Z Li0 F0.0 F0.1 F0.2 Lt0 L0 I0.2 A0.1 I0.1 W0.2 W0.1 B0.0 N <N >N "
            "C O0 O1 O2 ");
}

// Of a run of units, each once before the first backward, or with `minimal` all
// those before it for each.
TEST(Passes, RecomputationOfARun) {
  Units units = units_of(4, 0);
  for (auto& unit : units.all) unit.reduced = false;
  for (int64_t unit : {0, 1}) units.all[unit].recomputed_from = 0;
  for (int64_t unit : {2, 3}) units.all[unit].recomputed_from = 2;
  const std::string forward = "Z Li0 F0.0 F0.1 F0.2 F0.3 Lt0 L0 ";
  const std::string tail = "N <N >N C O0 O1 O2 O3 ";
  EXPECT_EQ(calls_of(lowered(1, units)),
            forward + "A0.2 A0.3 B0.3 B0.2 A0.0 A0.1 B0.1 B0.0 " + tail);
  units.minimal = true;
  for (int64_t unit : {0, 1, 2}) units.all[unit].recomputed_from = 0;
  units.all[3].recomputed_from.reset();
  EXPECT_EQ(
      calls_of(lowered(1, units)),
      forward + "B0.3 P0.0 P0.1 A0.2 B0.2 P0.0 A0.1 B0.1 A0.0 B0.0 " + tail);
  const Program split = passes::lower(
      accumulation(1), units, Purpose::kTraining, {.with = {"split_backward"}});
  EXPECT_EQ(calls_of(split),
            forward +
                "I0.3 P0.0 P0.1 A0.2 I0.2 P0.0 A0.1 I0.1 W0.3 W0.2 W0.1 "
                "A0.0 B0.0 " +
                tail);
}

// A tied embedding that is reduced with other stages is begun as early as it
// can, but awaited when they too have come to their end.
TEST(Passes, ReductionsAcrossStagesAreAwaitedAtTheEnd) {
  Units units = units_of(2, 0);
  units.all[0].across_stages = true;
  EXPECT_EQ(
      calls_of(lowered(1, units)),
      "Z Li0 F0.0 F0.1 Lt0 L0 B0.1 <R1 B0.0 <R0 >R1 >R0 N <N >N C O0 O1 ");
  EXPECT_EQ(
      calls_of(lowered(1, units, kAtOnce)),
      "Z Li0 F0.0 F0.1 Lt0 L0 B0.1 <R1 >R1 B0.0 <R0 >R0 N <N >N C O0 O1 ");
}

// Each of two blocks reads its experts too, which are in another stage.
TEST(Passes, ExpertsInAnotherStage) {
  for (int64_t expert_stage = 0; expert_stage <= 3; ++expert_stage) {
    Units units = units_of(4, 3);
    for (int64_t block : {1, 2}) {
      units.all[block].reads.push_back(static_cast<int64_t>(units.all.size()));
      units.all.push_back({.zero_stage = expert_stage});
    }
    const Program program = lowered(2, units);
    const int64_t gathers[] = {0, 2, 2, 2 * 2 * 2};  // of the experts
    EXPECT_EQ(check(program, units).gathers, 2 * 4 * 2 + gathers[expert_stage]);
    const auto reductions =
        std::ranges::count_if(program, [](const Instruction& each) {
          return each.op == Op::kReduceGradients && each.unit >= 4 &&
                 each.phase == Phase::kBegin;
        });
    EXPECT_EQ(reductions, expert_stage >= 2 ? 2 * 2 : 2);
  }
}

// ZeRO-3 gathers every unit for its forward and again for its backward, with at
// most the units that one unit reads at a time; without resharding once, and
// then all are there in the middle.
TEST(Passes, GathersOfStageThree) {
  const auto proof = [](const Units& units, int64_t k) {
    return check(lowered(k, units, kAtOnce), units);
  };
  for (int64_t k : {1, 3}) {
    EXPECT_EQ(proof(units_of(5, 3), k).gathers, 2 * 5 * k);
    EXPECT_EQ(proof(units_of(5, 3), k).peak_gathered, 1);
    EXPECT_EQ(proof(units_of(5, 3, false, /*reshard=*/false), k).gathers,
              5 * k);
    EXPECT_EQ(proof(units_of(5, 3, false, /*reshard=*/false), k).peak_gathered,
              5);
    // The tied embedding stays from the first use to the last.
    EXPECT_EQ(proof(units_of(5, 3, /*tied=*/true), k).gathers, (2 * 4 + 1) * k);
    EXPECT_EQ(proof(units_of(5, 3, /*tied=*/true), k).peak_gathered, 2);
    // Stages 1 and 2 gather once.
    EXPECT_EQ(proof(units_of(5, 1), k).gathers, 5);
    EXPECT_EQ(proof(units_of(5, 2), k).gathers, 5);
    EXPECT_EQ(proof(units_of(5, 0), k).gathers, 0);
  }
}

// What a stage sends and what it receives next travel together; with the pass
// the receive is posted before the work in front of it.
TEST(Passes, MessagesTravelTogether) {
  const auto calls = [](const passes::Choice& choice, int64_t stage = 0) {
    return calls_of(
        stages_of("1f1b", {.stages = 2, .num_microbatches = 2}, 1, choice)
            .programs[stage]
            ->program);
  };
  EXPECT_EQ(calls({.without = {"messages"}}),
            "Z Li0 F0.0 <sa0 >sa0 Li1 F1.0 <sa1 <rg0 >sa1 >rg0 B0.0 <rg1 >rg1 "
            "B1.0 N <N >N C O0 ");
  EXPECT_EQ(calls({}),
            "Z Li0 F0.0 <sa0 <rg0 Li1 F1.0 >sa0 <sa1 >rg0 <rg1 B0.0 >rg1 B1.0 "
            ">sa1 N <N >N C O0 ");
  // Both travel while the weights' part runs.
  EXPECT_EQ(calls({.without = {"messages"}, .with = {"split_backward"}}, 1),
            "Z <ra0 >ra0 F0.1 Lt0 L0 I0.1 <sg0 <ra1 W0.1 >sg0 >ra1 F1.1 Lt1 L1 "
            "I1.1 <sg1 W1.1 >sg1 N <N >N C O1 ");
}

// One use ahead, and no more: of states two units' are there at most, of
// parameters what two pieces of work need.
TEST(Passes, WhatLiesInFilesIsFetchedOneUseAhead) {
  for (const int64_t stage : {0, 1, 2, 3}) {
    Units units = units_of(5, stage, /*tied=*/true);
    units.offloads_states = units.offloads_parameters = true;
    const Program program = lowered(3, units);
    std::map<Op, int64_t> held, most;
    for (const auto& each : program) {
      if (is_fetch(each.op) && each.phase == Phase::kBegin) {
        most[each.op] = std::max(most[each.op], ++held[each.op]);
      }
      if (is_release(each.op)) --held[fetch_of(each.op)];
    }
    EXPECT_EQ(most[Op::kFetchStates], 2) << stage;
    EXPECT_LE(most[Op::kFetchParameters], stage == 3 ? 3 : 4) << stage;
    const auto place = [&](const Instruction& of) {
      return std::ranges::find(program, of) - program.begin();
    };
    EXPECT_LT(place(begin({Op::kFetchStates, -1, 2})),
              place({Op::kOptimizerStep, -1, 1}));
    EXPECT_GT(place(begin({Op::kFetchStates, -1, 2})),
              place({Op::kReleaseStates, -1, 0}));
    EXPECT_LT(place(begin({Op::kFetchStates, -1, 0})), place({Op::kNorm}));
  }
}

TEST(Passes, NothingIsFetchedThatLiesInMemory) {
  Units units = units_of(3, 2);
  const Program program = lowered(2, units);
  EXPECT_EQ(passes::offload(program, units), program);
  units.offloads_states = true;
  units.all[1].trained = false;  // frozen
  for (const auto& each : lowered(2, units)) {
    EXPECT_NE(each.op, Op::kFetchParameters);
    EXPECT_FALSE(is_fetch(each.op) && each.unit == 1);
  }
}

}  // namespace
}  // namespace tessera::program
