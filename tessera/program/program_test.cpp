#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tessera/program/checker.h"
#include "tessera/program/executor.h"
#include "tessera/program/schedules/pipeline.h"
#include "tessera/program/units.h"

namespace tessera::program {
namespace {

using schedules::Pipeline;
using schedules::pipeline;

Program accumulation(int64_t k, bool clip = true) {
  return pipeline({.num_microbatches = k, .clip = clip}, 0);
}

// One chunk of n units; `tied`: the last reads the first one's parameters too.
Units units_of(int64_t n, int64_t zero_stage, bool tied = false,
               bool reshard = true) {
  Units units;
  units.zero_stages.assign(n, zero_stage);
  units.reshard_after_forward = reshard;
  units.chunks.emplace_back(n);
  std::iota(units.chunks[0].begin(), units.chunks[0].end(), 0);
  for (int64_t unit = 0; unit < n; ++unit) units.reads.push_back({unit});
  if (tied) units.reads.back().push_back(0);
  return units;
}

TEST(Accumulation, OneMicrobatchAlive) {
  for (int64_t k = 1; k <= 16; ++k) {
    const Program program = accumulation(k);
    EXPECT_EQ(static_cast<int64_t>(program.size()), 4 * k + 4);
    const Proof proof = check(program);
    EXPECT_EQ(proof.num_microbatches, k);
    EXPECT_EQ(proof.peak_alive, 1);
  }
  EXPECT_EQ(describe(accumulation(2, /*clip=*/false)),
            "ZeroGradients\nLoadInputs 0\nForward 0\nLoadTargets 0\n"
            "Backward 0\nLoadInputs 1\nForward 1\nLoadTargets 1\n"
            "Backward 1\nAwaitGradients\nOptimizerStep\n");
}

// Every instruction matters: a program that lacks one, or has one twice, is
// refused (only clipping may be absent).
void expect_that_each_matters(const Program& sound, const Units& units) {
  for (size_t i = 0; i < sound.size(); ++i) {
    Program missing = sound;
    missing.erase(missing.begin() + static_cast<int64_t>(i));
    if (sound[i].op == Op::kClipNorm) {
      EXPECT_NO_THROW(check(missing, units));
    } else {
      EXPECT_THROW(check(missing, units), c10::Error) << describe(sound[i]);
    }
    Program doubled = sound;
    doubled.insert(doubled.begin() + static_cast<int64_t>(i), sound[i]);
    EXPECT_THROW(check(doubled, units), c10::Error) << describe(sound[i]);
  }
}

TEST(Checker, RefusesAProgramWithAnInstructionMissingOrDoubled) {
  expect_that_each_matters(accumulation(2), {});
  for (int64_t zero_stage = 0; zero_stage <= 3; ++zero_stage) {
    for (bool tied : {false, true}) {
      const Units units = units_of(3, zero_stage, tied);
      expect_that_each_matters(over_units(accumulation(2), units), units);
    }
  }
}

TEST(Checker, RefusesNeighboursInTheWrongOrder) {
  const Program sound = accumulation(1);
  for (size_t i = 0; i + 1 < sound.size(); ++i) {
    Program swapped = sound;
    std::swap(swapped[i], swapped[i + 1]);
    // Targets may be loaded before or after the forward.
    if (sound[i].op == Op::kForward && sound[i + 1].op == Op::kLoadTargets) {
      EXPECT_NO_THROW(check(swapped));
    } else {
      EXPECT_THROW(check(swapped), c10::Error) << describe(sound[i]);
    }
  }
}

// Each of two blocks reads its experts too, which are in another stage.
TEST(Units, ExpertsInAnotherStage) {
  Units units = units_of(4, 3);
  for (int64_t block : {1, 2}) {
    units.reads[block].push_back(static_cast<int64_t>(units.reads.size()));
    units.reads.emplace_back();
  }
  for (int64_t expert_stage = 0; expert_stage <= 3; ++expert_stage) {
    units.zero_stages = {3, 3, 3, 3, expert_stage, expert_stage};
    const Program program = over_units(accumulation(2), units);
    expect_that_each_matters(program, units);
    const int64_t gathers[] = {0, 2, 2, 2 * 2 * 2};  // of the experts
    EXPECT_EQ(check(program, units).gathers, 2 * 4 * 2 + gathers[expert_stage]);
    const auto reductions =
        std::ranges::count_if(program, [](const Instruction& each) {
          return each.op == Op::kReduceGradients && each.unit >= 4;
        });
    EXPECT_EQ(reductions, expert_stage >= 2 ? 2 * 2 : 2);
  }
}

// ZeRO-3 gathers every unit for its forward and again for its backward, with at
// most the units that one unit reads at a time; without resharding once, and
// then all are there in the middle.
TEST(Units, GathersOfStageThree) {
  const auto proof = [](const Units& units, int64_t k) {
    return check(over_units(accumulation(k), units), units);
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
    // Stages 1 and 2 gather once, behind the optimizer.
    EXPECT_EQ(proof(units_of(5, 1), k).gathers, 5);
    EXPECT_EQ(proof(units_of(5, 2), k).gathers, 5);
    EXPECT_EQ(proof(units_of(5, 0), k).gathers, 0);
  }
}

std::vector<Program> all_stages(const Pipeline& of) {
  std::vector<Program> programs;
  for (int64_t stage = 0; stage < of.stages; ++stage) {
    programs.push_back(pipeline(of, stage));
  }
  return programs;
}

// Figures of the usual example: four stages, eight micro-batches.
TEST(Pipeline, ActivationsAlive) {
  const auto alive = [](const Pipeline& of) {
    std::vector<int64_t> peaks;
    for (const auto& program : all_stages(of)) {
      peaks.push_back(check(program).peak_alive);
    }
    return peaks;
  };
  using Peaks = std::vector<int64_t>;
  EXPECT_EQ(alive({.schedule = "naive", .stages = 4, .num_microbatches = 8}),
            (Peaks{1, 1, 1, 1}));
  EXPECT_EQ(alive({.schedule = "gpipe", .stages = 4, .num_microbatches = 8}),
            (Peaks{8, 8, 8, 8}));
  EXPECT_EQ(alive({.schedule = "1f1b", .stages = 4, .num_microbatches = 8}),
            (Peaks{4, 3, 2, 1}));
  EXPECT_EQ(alive({.schedule = "interleaved",
                   .stages = 4,
                   .chunks = 2,
                   .num_microbatches = 8}),
            (Peaks{11, 9, 7, 5}));
}

// For every schedule and a grid of sizes: each stage's program is sound, and
// all come to their end where a send waits for its receive.
TEST(Pipeline, EverySizeIsSoundAndEnds) {
  for (const char* schedule : {"naive", "gpipe", "1f1b", "interleaved"}) {
    const bool interleaved = std::string(schedule) == "interleaved";
    for (int64_t p = 1; p <= 8; ++p) {
      for (int64_t v = interleaved ? 2 : 1; v <= (interleaved ? 4 : 1); ++v) {
        for (int64_t m = 1; m <= 16; ++m) {
          if (interleaved && (p == 1 || m % p != 0)) continue;
          const Pipeline of{schedule, p, v, m, true};
          const auto programs = all_stages(of);
          for (const auto& program : programs) {
            EXPECT_EQ(check(program).num_microbatches, m);
          }
          EXPECT_NO_THROW(check_messages(programs))
              << schedule << " p " << p << " v " << v << " m " << m;
        }
      }
    }
  }
}

TEST(Pipeline, LostAndCrossedMessagesAreRefused) {
  const auto sound =
      all_stages({.schedule = "1f1b", .stages = 3, .num_microbatches = 4});
  for (size_t stage = 0; stage < sound.size(); ++stage) {
    for (size_t i = 0; i < sound[stage].size(); ++i) {
      if (!is_message(sound[stage][i].op)) continue;
      auto lost = sound;
      lost[stage].erase(lost[stage].begin() + static_cast<int64_t>(i));
      EXPECT_THROW(check_messages(lost), c10::Error)
          << describe(sound[stage][i]);
      auto crossed = sound;
      crossed[stage][i].microbatch ^= 1;
      EXPECT_THROW(check_messages(crossed), c10::Error)
          << describe(sound[stage][i]);
    }
  }
}

class RecordingStage : public Stage {
 public:
  std::string calls;
  void zero_gradients() override { calls += "Z "; }
  void load_inputs(int64_t m) override { add("Li", m); }
  void load_targets(int64_t m) override { add("Lt", m); }
  void exchange(const Program& messages) override {
    calls += "(";
    for (const auto& message : messages)
      add(name_of(message.op), message.microbatch);
    calls += ")";
  }
  void forward(int64_t m, int64_t unit) override { add("F", m, unit); }
  void backward(int64_t m, int64_t unit) override { add("B", m, unit); }
  void gather_parameters(int64_t unit) override { add("G", unit); }
  void free_parameters(int64_t unit) override { add("f", unit); }
  void reduce_gradients(int64_t unit) override { add("R", unit); }
  void await_gradients() override { calls += "W "; }
  void clip_norm() override { calls += "C "; }
  void optimizer_step() override { calls += "O "; }

 private:
  void add(const std::string& name, int64_t m, int64_t unit = -1) {
    calls += name + std::to_string(m);
    if (unit >= 0) calls += "." + std::to_string(unit);
    calls += " ";
  }
};

TEST(Executor, CallsWhatTheProgramSays) {
  RecordingStage stage;
  size_t observed = 0;
  const Program program = accumulation(2);
  execute(program, stage, [&](const Instruction& instruction, double seconds) {
    EXPECT_EQ(instruction, program[observed++]);
    EXPECT_GE(seconds, 0);
  });
  EXPECT_EQ(stage.calls, "Z Li0 F0 Lt0 B0 Li1 F1 Lt1 B1 W C O ");
  EXPECT_EQ(observed, program.size());
}

TEST(Executor, OverUnits) {
  const auto calls = [](const Units& units) {
    RecordingStage stage;
    execute(over_units(accumulation(1, /*clip=*/false), units), stage);
    return stage.calls;
  };
  EXPECT_EQ(calls(units_of(2, 0)), "Z Li0 F0.0 F0.1 Lt0 B0.1 R1 B0.0 R0 W O ");
  EXPECT_EQ(calls(units_of(2, 1)),
            "Z Li0 F0.0 F0.1 Lt0 B0.1 R1 B0.0 R0 W O G0 G1 ");
  EXPECT_EQ(calls(units_of(2, 3)),
            "Z Li0 G0 F0.0 f0 G1 F0.1 f1 Lt0 G1 B0.1 R1 f1 G0 B0.0 R0 f0 W O ");
  EXPECT_EQ(calls(units_of(2, 3, /*tied=*/true)),
            "Z Li0 G0 F0.0 G1 F0.1 f1 Lt0 G1 B0.1 R1 f1 B0.0 R0 f0 W O ");
}

// What a stage sends and what it receives next travel together.
TEST(Executor, MessagesTravelTogether) {
  RecordingStage stage;
  execute(pipeline({.stages = 2, .num_microbatches = 3, .clip = false}, 0),
          stage);
  EXPECT_EQ(stage.calls,
            "Z Li0 F0 (SendActivations0 )Li1 F1 (SendActivations1 "
            "ReceiveGradients0 )B0 Li2 F2 (SendActivations2 ReceiveGradients1 "
            ")B1 (ReceiveGradients2 )B2 W O ");
}

}  // namespace
}  // namespace tessera::program
