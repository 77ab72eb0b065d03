#include "tessera/program/checker.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tessera/program/schedules/schedule.h"
#include "tests/support/programs.h"

namespace tessera::program {
namespace {

const passes::Choice kSplit = {.with = {"split_backward"}};

// Every instruction matters: a program that lacks one, or has one twice, is
// refused. Only clipping may be absent.
void expect_that_each_matters(const Program& sound, const Units& units) {
  for (size_t i = 0; i < sound.size(); ++i) {
    Program missing = sound;
    missing.erase(missing.begin() + static_cast<int64_t>(i));
    if (sound[i].op == Op::kClipGradients) {
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
      Units units = units_of(3, zero_stage, tied);
      units.all[1].recomputed_from = 1;
      units.all[2].summed = zero_stage > 0;
      expect_that_each_matters(lowered(2, units), units);
      expect_that_each_matters(
          lowered(2, units, {"prefetch", "reductions", "messages"}), units);
      const Program split =
          passes::lower(accumulation(2), units, Purpose::kTraining, kSplit);
      expect_that_each_matters(split, units);
    }
  }
}

TEST(Checker, RefusesARecomputationWithAnInstructionMissingOrDoubled) {
  for (int64_t zero_stage : {0, 3}) {
    for (bool minimal : {false, true}) {
      Units units = units_of(4, zero_stage);
      units.minimal = minimal;
      for (int64_t unit : {0, 1, 2}) units.all[unit].recomputed_from = 0;
      if (!minimal) units.all[3].recomputed_from = 3;
      expect_that_each_matters(lowered(2, units), units);
      const Program split =
          passes::lower(accumulation(2), units, Purpose::kTraining, kSplit);
      expect_that_each_matters(split, units);
    }
  }
}

TEST(Checker, RefusesAForwardThatDoesNotKnowItsDocuments) {
  const schedules::Shape shape{
      .stages = 3, .num_microbatches = 2, .documents = true};
  const auto& schedule = schedules::named("1f1b");
  for (int64_t stage = 0; stage < 3; ++stage) {
    const Program program = schedules::step(schedule, shape, stage);
    Units units;
    units.documents = true;
    EXPECT_NO_THROW(check(program, units));
    expect_that_each_matters(program, units);
  }
}

// A chunk that is handed over on its rank, there and back.
TEST(Checker, EachHandOverMatters) {
  const schedules::Shape shape{.stages = 1, .chunks = 2, .num_microbatches = 2};
  const auto& schedule = schedules::named("zb_v");
  const Program program = schedules::step(schedule, shape, /*stage=*/0);
  EXPECT_EQ(std::ranges::count(program, Op::kHandActivations, &Instruction::op),
            2);
  EXPECT_EQ(std::ranges::count(program, Op::kHandGradients, &Instruction::op),
            2);
  Units units;
  EXPECT_NO_THROW(check(program, units));
  expect_that_each_matters(program, units);
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

// Moves the first instruction like `what` behind the first like `behind`.
Program moved(Program program, const Instruction& what,
              const Instruction& behind) {
  const auto from = std::ranges::find(program, what);
  TORCH_INTERNAL_ASSERT(from != program.end());
  program.erase(from);
  const auto to = std::ranges::find(program, behind);
  TORCH_INTERNAL_ASSERT(to != program.end());
  program.insert(to + 1, what);
  return program;
}

void expect_refused(const Program& program, const Units& units,
                    const std::string& rule) {
  try {
    check(program, units);
    FAIL() << "not refused: " << rule << "\n" << describe(program);
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find(rule), std::string::npos)
        << error.what_without_backtrace();
  }
}

TEST(Checker, NamesWhatIsBegunAndAwaitedWrongly) {
  const Units units = units_of(3, 3);
  const Program sound = lowered(1, units);
  const Instruction gather{Op::kGatherParameters, -1, 1};
  const Instruction reduce{Op::kReduceGradients, 0, 1};
  expect_refused(moved(sound, await(gather), {Op::kForward, 0, 1}), units,
                 "are still on their way");
  expect_refused(moved(sound, await(gather), {Op::kFreeParameters, -1, 1}),
                 units, "still on their way");
  expect_refused(moved(sound, await(reduce), {Op::kNorm}), units,
                 "is not awaited yet");
  expect_refused(moved(sound, begin(reduce), {Op::kAllocateGradients, -1, 1}),
                 units, "nothing new to reduce");
  const Units whole = units_of(3, 0);
  expect_refused(moved(lowered(1, whole), begin({Op::kReduceGradients, -1, 0}),
                       begin({Op::kReduceGradients, -1, 2})),
                 whole, "nothing new to reduce");
}

TEST(Checker, NamesWhatIsRecomputedWrongly) {
  Units units = units_of(3, 0);
  units.minimal = true;
  for (int64_t unit : {0, 1}) units.all[unit].recomputed_from = 0;
  const Program sound = lowered(1, units);
  const Instruction replay{Op::kReplay, 0, 0}, again{Op::kRecompute, 0, 1};
  expect_refused(moved(sound, replay, again), units, "its input is not there");
  expect_refused(moved(sound, again, {Op::kBackward, 0, 1}), units,
                 "what was replayed is not taken yet");
  expect_refused(moved(sound, {Op::kRecompute, 0, 0}, {Op::kBackward, 0, 0}),
                 units, "not kept, nor recomputed");
  Program kept = sound;
  kept.insert(std::ranges::find(kept, again), {Op::kRecompute, 0, 2});
  expect_refused(kept, units, "its activations were kept");
  Program late = sound;
  late.insert(std::ranges::find(late, Instruction{Op::kRecompute, 0, 0}),
              {Op::kReplay, 0, 1});
  expect_refused(late, units, "went backward already");
}

TEST(Checker, RefusesUnitsThatThereAreNot) {
  for (int64_t stage : {0, 3}) {
    const Units units = units_of(2, stage);
    for (const Instruction& wrong : lowered(1, units)) {
      if (wrong.unit < 0) continue;
      for (int64_t unit : {-1, 2}) {
        Program program = lowered(1, units);
        std::ranges::find(program, wrong)->unit = unit;
        expect_refused(program, units, "unit");
      }
    }
  }
}

// What stays whole is reduced behind the last backward that adds to it.
TEST(Checker, RefusesAReductionThatIsTooEarly) {
  const Units units = units_of(2, 0);
  Program early = lowered(2, units);
  const Instruction reduce = begin({Op::kReduceGradients, -1, 1});
  early.erase(std::ranges::find(early, reduce));
  const auto first = std::ranges::find(early, Instruction{Op::kBackward, 0, 1});
  early.insert(first + 1, reduce);
  expect_refused(early, units, "were reduced already");
}

TEST(Checker, UpdatesOfWholeMatricesAreGatheredFirst) {
  Units units = units_of(2, 1);
  units.all[1].whole_updates = true;
  const Program sound = lowered(1, units);
  expect_that_each_matters(sound, units);
  const Instruction gather{Op::kGatherUpdates, -1, 1};
  const Instruction step{Op::kOptimizerStep, -1, 1};
  EXPECT_LT(std::ranges::find(sound, Instruction{Op::kClipGradients}),
            std::ranges::find(sound, begin(gather)));
  Program late = sound;
  std::iter_swap(std::ranges::find(late, await(gather)),
                 std::ranges::find(late, step));
  expect_refused(late, units, "what it is updated by is not gathered yet");
  expect_refused(moved(sound, {Op::kClipGradients}, begin(gather)), units,
                 "clipped once, before the update");
  Program needless = sound;
  needless.insert(std::ranges::find(needless, begin(gather)),
                  begin({Op::kGatherUpdates, -1, 0}));
  expect_refused(needless, units, "its updates need no others' pieces");
}

// Nothing of it can be left out, nor a use stand outside of a fetch.
TEST(Checker, WhatLiesInFilesIsUsedWhileItIsFetched) {
  for (const int64_t stage : {0, 1, 3}) {
    Units units = units_of(3, stage, /*tied=*/true);
    units.offloads_states = units.offloads_parameters = true;
    const Program sound = lowered(2, units);
    expect_that_each_matters(sound, units);
    const Instruction step{Op::kOptimizerStep, -1, 1};
    expect_refused(moved(sound, step, begin({Op::kFetchStates, -1, 1})), units,
                   "needs FetchStates unit 1");
    expect_refused(moved(sound, step, {Op::kReleaseStates, -1, 1}), units,
                   "needs FetchStates unit 1, which was not begun");
  }
}

TEST(Checker, TheNextBatchIsSharedOnceWhereOneRankReads) {
  Units units = units_of(2, 1);
  units.shares_batch = true;
  const Program sound = lowered(2, units);
  expect_that_each_matters(sound, units);
  units.shares_batch = false;
  expect_refused(sound, units, "every rank reads for itself");
}

// Two stages of four steps that go on, in each stage of ZeRO.
Units units_of_delayed(int64_t stage, int64_t zero_stage) {
  Units units = units_of(4, zero_stage);
  units.chunks = {{2 * stage, 2 * stage + 1}};
  units.versions = {.parameters = 2, .gradients = stage + 1};
  return units;
}

Program delayed(int64_t stage, const Units& units, int64_t count = 3) {
  return passes::lower(
      schedules::steps(schedules::named("pipedream_2bw"),
                       {.stages = 2, .num_microbatches = 2}, stage, count),
      units);
}

TEST(Checker, EachInstructionOfStepsThatGoOnMatters) {
  for (int64_t stage : {0, 1}) {
    for (int64_t zero_stage = 0; zero_stage <= 3; ++zero_stage) {
      const Units units = units_of_delayed(stage, zero_stage);
      expect_that_each_matters(delayed(stage, units), units);
      expect_that_each_matters(delayed(stage, units, 1), units);
    }
  }
}

// Those that another stage has.
TEST(Checker, RefusesUpdatesAndGathersOfWhatDoesNotLieHere) {
  const Units units = units_of_delayed(/*stage=*/0, /*zero_stage=*/3);
  const Program sound = delayed(/*stage=*/0, units);
  EXPECT_NO_THROW(check(sound, units));
  for (const Instruction& wrong : {Instruction{Op::kOptimizerStep, -1, 3},
                                   Instruction{Op::kKeepParameters, -1, 3},
                                   begin({Op::kGatherParameters, -1, 3})}) {
    Program program = sound;
    program.insert(program.begin(), wrong);
    expect_refused(program, units, "no unit that runs here reads");
  }
}

TEST(Checker, NamesVersionsThatAreReadWrongly) {
  const Units units = units_of_delayed(1, 0);
  const Program sound = delayed(1, units);
  // A backward that reads what the update made, and all of its micro-batch.
  Program mixed = sound;
  std::ranges::find(mixed, Instruction{Op::kBackward, 1, 2})->version = 1;
  expect_refused(mixed, units, "its micro-batch began with version 0");
  const auto shifted = [&](int64_t microbatch, int64_t version) {
    Program program = sound;
    for (auto& each : program) {
      if (each.microbatch == microbatch) each.version = version;
    }
    return program;
  };
  expect_refused(shifted(4, 0), units, "behind the norm");
  expect_refused(shifted(2, 2), units, "is not there yet");
  // The next batch's gradients where the step's still are.
  Units one = units;
  one.versions.gradients = 1;
  expect_refused(sound, one, "gradients of the step before are still there");
  // Written over while a backward is to come.
  const Instruction next{.op = Op::kNextVersion};
  Program early = sound;
  early.erase(std::ranges::find(early, next));
  early.insert(std::ranges::find(
                   early, Instruction{.op = Op::kKeepParameters, .unit = 2}),
               next);
  expect_refused(early, units, "unit 2 is not updated");
}

TEST(Checker, Evaluations) {
  const Units units = units_of(3, 3, /*tied=*/true);
  const Program program =
      passes::lower(schedules::evaluation({.num_microbatches = 2}, 0), units,
                    Purpose::kEvaluation);
  EXPECT_EQ(check(program, units, Purpose::kEvaluation).num_microbatches, 2);
  EXPECT_THROW(check(program, units), c10::Error);
  EXPECT_THROW(check(lowered(1, units), units, Purpose::kEvaluation),
               c10::Error);
}

TEST(Checker, DevicesOfOneProcess) {
  Units units;
  units.devices = 4;
  const Program program = lowered(2, units);
  EXPECT_EQ(program.front(), Instruction{Op::kReplicateParameters});
  expect_that_each_matters(program, units);
}

}  // namespace
}  // namespace tessera::program
