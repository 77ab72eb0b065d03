#include "tessera/program/simulator.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tessera/program/schedules/equal_stages.h"
#include "tests/support/programs.h"

namespace tessera::program {
namespace {

using schedules::Shape;

Simulation simulated(const std::string& schedule, const Shape& shape,
                     const Times& times = {1, 1, 1}, double message = 0) {
  return schedules::simulate(schedules::named(schedule), shape, times, message);
}

std::vector<RankProgram> programs_of(const std::string& schedule,
                                     const Shape& shape) {
  return schedules::programs_of(schedules::named(schedule), shape);
}

void expect_parts(const Simulation& simulation) {
  for (const auto& each : simulation.classes) {
    EXPECT_NEAR(each.work + each.bubble + each.exposed + each.files,
                simulation.step, 1e-9);
  }
}

// Worked example 7: p stages, m micro-batches, a backward of two forwards.
TEST(Simulator, StepsOfTheUsualExample) {
  const auto step = [](const char* schedule, int64_t p, int64_t m,
                       int64_t v = 1) {
    const auto simulation =
        simulated(schedule, {.stages = p, .chunks = v, .num_microbatches = m});
    expect_parts(simulation);
    for (const auto& each : simulation.classes) {
      EXPECT_DOUBLE_EQ(each.bubble, simulation.step - 3.0 * m);
    }
    return simulation.step;
  };
  EXPECT_DOUBLE_EQ(step("naive", 4, 8), 96);
  EXPECT_DOUBLE_EQ(step("gpipe", 4, 8), 33);
  EXPECT_DOUBLE_EQ(step("1f1b", 4, 8), 33);
  EXPECT_DOUBLE_EQ(step("interleaved", 4, 8, 2), 28.5);
  for (const char* schedule : {"gpipe", "1f1b"}) {
    EXPECT_DOUBLE_EQ(step(schedule, 2, 4), 15);
    EXPECT_DOUBLE_EQ(step(schedule, 8, 16), 69);
    EXPECT_DOUBLE_EQ(step(schedule, 4, 4), 21);
    EXPECT_DOUBLE_EQ(step(schedule, 2, 8), 27);
    EXPECT_DOUBLE_EQ(step(schedule, 8, 64), 213);
  }
  // GPipe whose stages compute their forward again.
  EXPECT_DOUBLE_EQ(
      simulated("gpipe", {.stages = 4, .num_microbatches = 8}, {1, 2, 1}).step,
      44);
  // Rank 0 with stages 1 and 4, and without chunks.
  EXPECT_DOUBLE_EQ(step("interleaved", 3, 6, 2), 21);
  EXPECT_DOUBLE_EQ(step("1f1b", 3, 6), 24);
}

TEST(Simulator, BubblesOfTheUsualExample) {
  const auto bubble = [](const char* schedule, int64_t v = 1, int64_t p = 4,
                         int64_t m = 8) {
    return simulated(schedule,
                     {.stages = p, .chunks = v, .num_microbatches = m})
        .bubble();
  };
  EXPECT_DOUBLE_EQ(bubble("1f1b", 1, 2, 4), 0.2);
  EXPECT_NEAR(bubble("1f1b", 1, 8, 16), 0.3043, 5e-5);
  EXPECT_NEAR(bubble("1f1b", 1, 4, 4), 0.4286, 5e-5);
  EXPECT_NEAR(bubble("1f1b", 1, 8, 64), 0.0986, 5e-5);
  EXPECT_DOUBLE_EQ(bubble("naive"), 0.75);
  EXPECT_NEAR(bubble("gpipe"), 0.2727, 5e-5);
  EXPECT_NEAR(bubble("1f1b"), 0.2727, 5e-5);
  EXPECT_NEAR(bubble("interleaved", 2), 0.1579, 5e-5);
  // The whole batch at once.
  EXPECT_DOUBLE_EQ(
      simulated("naive", {.stages = 4, .num_microbatches = 1}, {8, 8, 8}).step,
      96);
}

// The formulas of Narayanan et al. 2021 and of Qi et al. 2023.
TEST(Simulator, BubblesAreThoseOfTheFormulas) {
  const Times times{1, 1.25, 0.75};
  for (int64_t p = 2; p <= 8; ++p) {
    for (int64_t m : {2 * p, 5 * p}) {
      const auto bubble = [&](const char* schedule, int64_t v = 1) {
        const auto simulation = simulated(
            schedule, {.stages = p, .chunks = v, .num_microbatches = m}, times);
        expect_parts(simulation);
        return simulation.step - 3.0 * m;
      };
      EXPECT_NEAR(bubble("gpipe"), 3.0 * (p - 1), 1e-9);
      EXPECT_NEAR(bubble("1f1b"), 3.0 * (p - 1), 1e-9);
      for (int64_t v : {2, 4}) {
        EXPECT_NEAR(bubble("interleaved", v), 3.0 * (p - 1) / v, 1e-9);
      }
    }
  }
}

// Of worked example 9: a stage's instructions, without those of the norm and
// the loss, which are apart here.
TEST(Simulator, InstructionsOfTheUsualExample) {
  const auto counted = [](const Instruction& each) {
    return each.op != Op::kNorm && each.op != Op::kSumNorm &&
           each.op != Op::kLoss;
  };
  for (int64_t m : {4, 8}) {
    for (int64_t stage : {0, 1, 2}) {
      const Program program = schedules::step(
          schedules::named("gpipe"), {.stages = 3, .num_microbatches = m},
          stage, {.clip = false, .alone = true});
      EXPECT_EQ(std::ranges::count_if(program, counted),
                (stage == 1 ? 6 : 5) * m + 2);
    }
    EXPECT_EQ(std::ranges::count_if(accumulation(m, /*clip=*/false), counted),
              4 * m + 2);
  }
}

// Its whole step of two micro-batches through three stages. What reduces behind
// the last backward comes from a pass.
TEST(Simulator, StreamOfTheUsualExample) {
  const auto stream = [](int64_t stage) {
    std::string words;
    for (const auto& each : schedules::step(
             schedules::named("gpipe"), {.stages = 3, .num_microbatches = 2},
             stage, {.clip = false, .alone = true})) {
      if (each.op == Op::kNorm || each.op == Op::kSumNorm ||
          each.op == Op::kLoss) {
        continue;
      }
      words += name_of(each.op);
      if (each.microbatch >= 0) words += std::to_string(each.microbatch);
      words += " ";
    }
    return words;
  };
  EXPECT_EQ(stream(0),
            "ZeroGradients LoadInputs0 Forward0 SendActivations0 "
            "LoadInputs1 Forward1 SendActivations1 "
            "ReceiveGradients1 Backward1 ReceiveGradients0 Backward0 "
            "OptimizerStep ");
  EXPECT_EQ(stream(1),
            "ZeroGradients ReceiveActivations0 Forward0 SendActivations0 "
            "ReceiveActivations1 Forward1 SendActivations1 "
            "ReceiveGradients1 Backward1 SendGradients1 "
            "ReceiveGradients0 Backward0 SendGradients0 OptimizerStep ");
  EXPECT_EQ(stream(2),
            "ZeroGradients ReceiveActivations0 Forward0 "
            "ReceiveActivations1 Forward1 LoadTargets1 Backward1 "
            "SendGradients1 LoadTargets0 Backward0 SendGradients0 "
            "OptimizerStep ");
}

// A row of ../shared/tables/zero_bubble_rates.csv: Qi et al. 2023, tables 5
// and 9.
struct Published {
  int64_t stages, microbatches;
  Times times;
  double message, of_1f1b, of_interleaved, of_zb_h1, of_zb_h2;
};
const std::vector<Published> kPublished = {
    {8, 24, {18.522, 18.086, 9.337}, 0.601, 0.2431, 0.1055, 0.1585, 0.1083},
    {8, 64, {18.546, 18.097, 9.321}, 0.762, 0.1240, 0.0443, 0.0674, 0.0444},
    {8, 32, {29.802, 29.428, 19.53}, 0.577, 0.1898, 0.0628, 0.1045, 0.0559},
    {16, 48, {11.347, 11.248, 8.132}, 0.377, 0.2552, 0.1104, 0.1397, 0.0672},
    {16, 128, {11.325, 11.308, 8.109}, 0.378, 0.1251, 0.0445, 0.0576, 0.0266},
    {32, 128, {10.408, 10.204, 7.703}, 0.408, 0.2168, 0.1164, 0.1106, 0.049},
};

double work_of(const Published& row) {
  return static_cast<double>(row.microbatches) *
         (row.times.forward + row.times.input + row.times.weight);
}

Simulation simulated(const char* schedule, const Published& row,
                     int64_t chunks = 1) {
  return simulated(schedule,
                   {.stages = row.stages,
                    .chunks = chunks,
                    .num_microbatches = row.microbatches},
                   row.times, row.message);
}

// The paper's rate: of the step, what is no work.
TEST(Simulator, PublishedRates) {
  for (const Published& row : kPublished) {
    const auto rate = [&](const char* schedule) {
      return 1 - work_of(row) / simulated(schedule, row).step;
    };
    // As many decimals as were published.
    EXPECT_NEAR(rate("1f1b"), row.of_1f1b, 5e-5);
    EXPECT_NEAR(rate("zb_h1"), row.of_zb_h1, 5e-5);
    // Its stages do not wait for each other at the end: its cost is the
    // longest time of one.
    double longest = 0;
    for (const auto& each : simulated("zb_h2", row).classes) {
      longest = std::max(longest, each.busy.end - each.busy.begin);
    }
    EXPECT_NEAR(1 - work_of(row) / longest, row.of_zb_h2, 5e-5);
  }
}

// With as many chunks as each of the paper's models has layers a stage, and
// what a task makes sent at once.
TEST(Simulator, PublishedRatesOfInterleaved) {
  const schedules::Schedule at_once{
      .name = "interleaved, sent at once",
      .turns =
          [](const Shape& shape, int64_t stage) {
            std::vector<schedules::Turn> turns;
            for (const auto& turn :
                 schedules::named("interleaved").turns(shape, stage)) {
              for (const auto& task : turn) turns.push_back({task});
            }
            return turns;
          },
      .chunked = true,
      .multiple_of_stages = true,
      .sends_wait = true};
  const std::vector<int64_t> chunks = {3, 3, 4, 3, 3, 2};
  for (size_t i = 0; i < kPublished.size(); ++i) {
    const Published& row = kPublished[i];
    const auto simulation =
        schedules::simulate(at_once,
                            {.stages = row.stages,
                             .chunks = chunks[i],
                             .num_microbatches = row.microbatches},
                            row.times, row.message);
    const double rate = 1 - work_of(row) / simulation.step;
    EXPECT_NEAR(rate / row.of_interleaved, 1, 0.042) << i;
  }
}

// Times by hand: the second of two stages takes twice as long.
TEST(Simulator, UnevenStages) {
  const auto itself = [](int64_t rank) { return rank; };
  const auto simulation = schedules::simulate(
      programs_of("1f1b", {.stages = 2, .num_microbatches = 4}),
      {.work = work_of_stages({{1, 1, 1}, {2, 2, 2}}, {}, 1, itself),
       .links = {{.latency = 0.5}}});
  expect_parts(simulation);
  // 1, 0.5, four times 6, 0.5, and a backward of 2.
  EXPECT_DOUBLE_EQ(simulation.step, 28);
  EXPECT_DOUBLE_EQ(simulation.of(0).bubble, 16);
  EXPECT_DOUBLE_EQ(simulation.of(1).bubble, 4);
  EXPECT_DOUBLE_EQ(simulation.of(1).busy.begin, 1.5);
}

// One rank whose gathers of 1 lie beside units of 1, or do not.
TEST(Simulator, CollectivesLieBesideWork) {
  Units units = units_of(4, 3);
  const auto simulation = [&](int64_t prefetch) {
    units.prefetch = prefetch;
    RankProgram program;
    program.program = lowered(1, units);
    for (int64_t unit = 0; unit < 4; ++unit) {
      program.units.push_back({.gather = {{"all_gather", 0, at::kByte, 50}}});
    }
    const World world{
        .programs = {&program, &program},
        .lanes = {"dp_shard"},
        .members = [](int64_t, int64_t) { return std::vector<int64_t>{0, 1}; }};
    const auto all =
        simulate(world, {.work =
                             [](int64_t, const Instruction& each) {
                               return is_compute(each.op) ? 1.0 : 0.0;
                             },
                         .links = {{.latency = 0.5, .bytes_per_time = 100}}});
    expect_parts(all);
    EXPECT_EQ(all.classes.size(), 1U);
    EXPECT_EQ(all.classes[0].num_ranks, 2);
    EXPECT_DOUBLE_EQ(all.classes[0].work, 8);
    EXPECT_DOUBLE_EQ(all.classes[0].bubble, 0);
    return all.classes[0].exposed;
  };
  EXPECT_DOUBLE_EQ(simulation(0), 8);  // as many gathers
  // The first, and that of the last unit, which was freed right before.
  EXPECT_DOUBLE_EQ(simulation(1), 2);
}

TEST(Simulator, RingsOverLinks) {
  const Link link{.latency = 2, .bytes_per_time = 10};
  EXPECT_DOUBLE_EQ(time_of("all_reduce", 4, 400, link), 2 * 3 * (2 + 10.0));
  EXPECT_DOUBLE_EQ(time_of("all_gather", 4, 400, link), 3 * (2 + 10.0));
  EXPECT_DOUBLE_EQ(time_of("reduce_scatter", 2, 400, link), 22);
  EXPECT_DOUBLE_EQ(time_of("all_reduce", 1, 400, link), 0);
  EXPECT_DOUBLE_EQ(time_of("all_reduce", 1024, 10, link), 2 * 10 * 3);
  EXPECT_DOUBLE_EQ(time_of("send", 2, 400, link), 42);
  EXPECT_DOUBLE_EQ(time_of("recv", 2, 400, link), 0);
}

// What each rank sends to the next one is what that one receives.
TEST(Simulator, AHopOfARingIsOneMessage) {
  RankProgram program;
  program.program = {Instruction{Op::kForward, 0, 0}};
  program.units = {
      {.forward = {{"send", 0, at::kByte, 400}, {"recv", 0, at::kByte, 400}}}};
  const World world{
      .programs = {&program, &program},
      .lanes = {"cp"},
      .members = [](int64_t, int64_t) { return std::vector<int64_t>{0, 1}; }};
  const auto all = simulate(
      world, {.work = {}, .links = {{.latency = 2, .bytes_per_time = 10}}});
  EXPECT_DOUBLE_EQ(all.of(0).exposed, 42);
  EXPECT_EQ(moved_bytes(world, 0, program.program, 4), 400);
}

Work unit_work() {
  return [](int64_t, const Instruction& each) {
    return time_of(each.op, Times{});
  };
}

// Messages of a stage follow one another over its link.
TEST(Simulator, MessagesFollowOneAnother) {
  auto programs = programs_of("gpipe", {.stages = 2, .num_microbatches = 4});
  for (auto& each : programs) each.message_elements = 5;
  const auto simulation = schedules::simulate(
      programs,
      {.work = unit_work(), .links = {{.latency = 1, .bytes_per_time = 10}}});
  // They go off at 1, 3, 5, 7 and take 3: forwards end at 5, 7, 9, 11. The
  // first gradient comes at 16, the last at 22.
  EXPECT_DOUBLE_EQ(simulation.of(1).busy.begin, 4);
  EXPECT_DOUBLE_EQ(simulation.of(1).busy.end, 19);
  EXPECT_DOUBLE_EQ(simulation.step, 24);
}

std::string refusal(const std::vector<RankProgram>& programs) {
  try {
    schedules::simulate(programs, {});
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(Simulator, WhatDoesNotEndIsRefusedByName) {
  const auto without = [&](int64_t stage, const char* what) {
    auto programs = programs_of("1f1b", {.stages = 2, .num_microbatches = 2});
    const auto is_it = [&](const Instruction& each) {
      return describe(each).find(what) != std::string::npos;
    };
    EXPECT_GT(std::erase_if(programs[stage].program, is_it), 0U);
    return refusal(programs);
  };
  const auto expect = [](const std::string& message, const char* words) {
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  expect(without(0, "SendActivations 1"),
         "rank 1, which waits at 9: await ReceiveActivations 1");
  expect(without(0, "ReceiveGradients 1"),
         "rank 0 never receives the gradients of micro-batch 1");
  expect(without(1, "SumNorm"),
         "SumNorm: waits for ever for rank 1 in group world, which has ended");
}

// Each waits for what the other sends behind it.
TEST(Simulator, DeadlocksAreRefusedByName) {
  auto programs = programs_of("1f1b", {.stages = 2, .num_microbatches = 1});
  auto& program = programs[0].program;
  const auto at = [&](Op op, Phase phase) {
    return std::ranges::find_if(program, [&](const Instruction& each) {
      return each.op == op && each.phase == phase;
    });
  };
  const auto send = at(Op::kSendActivations, Phase::kBegin);
  const auto receive = at(Op::kReceiveGradients, Phase::kAwait);
  ASSERT_LT(send, receive);
  std::rotate(send, send + 1, receive + 1);
  const std::string message = refusal(programs);
  EXPECT_NE(message.find("waits for ever for rank 1, which waits at"),
            std::string::npos)
      << message;
}

// Rank r along dp, s along pp is 2 s + r.
TEST(Simulator, EqualRanksAreOne) {
  const auto programs =
      programs_of("1f1b", {.stages = 2, .num_microbatches = 4});
  const World world{
      .programs = {&programs[0], &programs[0], &programs[1], &programs[1]},
      .lanes = {"pp", "world"},
      .pipeline = 0,
      .members = [](int64_t rank, int64_t lane) -> std::vector<int64_t> {
        if (lane == 1) return {0, 1, 2, 3};
        return {rank % 2, rank % 2 + 2};
      }};
  const auto simulation = simulate(world, {.work = unit_work()});
  EXPECT_EQ(simulation.classes.size(), 2U);
  EXPECT_EQ(simulation.of(3).rank, 2);
  EXPECT_EQ(simulation.of(3).num_ranks, 2);
  EXPECT_DOUBLE_EQ(simulation.step, 15);
}

// They run one program, but two of them have a group and one has none.
TEST(Simulator, GroupsThatAreNotEquallyLargeAreNotAlike) {
  RankProgram program;
  program.program = {Instruction{Op::kSumNorm}};
  program.norm = {{"all_reduce", 0, at::kByte, 100}};
  const World world{
      .programs = {&program, &program, &program},
      .lanes = {"dp_shard"},
      .members = [](int64_t rank, int64_t) -> std::vector<int64_t> {
        if (rank == 2) return {2};
        return {0, 1};
      }};
  const auto all = simulate(world, {.work = {}, .links = {{.latency = 1}}});
  EXPECT_EQ(all.classes.size(), 2U);
  EXPECT_DOUBLE_EQ(all.of(0).exposed, 2);
  EXPECT_DOUBLE_EQ(all.of(2).exposed, 0);
}

TEST(Costs, MeasuredTimesAreMeans) {
  const Work work = work_of_measured({{1,
                                       {{{Op::kForward, 0, 2}, 1.0},
                                        {{Op::kForward, 1, 2}, 3.0},
                                        {{Op::kBackward, 0, 2}, 5.0}}}});
  EXPECT_DOUBLE_EQ(work(1, {Op::kForward, 7, 2}), 2);
  EXPECT_DOUBLE_EQ(work(1, {Op::kBackward, 1, 2}), 5);
  EXPECT_DOUBLE_EQ(work(0, {Op::kForward, 7, 2}), 0);
}

TEST(Costs, ADeviceTakesAsLongAsOperationsOrBytes) {
  RankFacts rank;
  rank.facts.units.resize(2);
  auto& unit = rank.facts.units[1];
  unit.forward.matmul = 100;
  unit.backward_input.matmul = 100;
  unit.backward_weight.matmul = 300;
  unit.input_bytes = unit.output_bytes = 10;
  unit.reads = {1};
  unit.parameters.push_back({.parameter_bytes = 20,
                             .optimizer_bytes = 40,
                             .read_bytes = 20,
                             .updated_bytes = 60,
                             .update_flops = 700});
  rank.units.all.resize(2);
  rank.units.chunks = {{1}};
  const auto time = [&](const Device& device, Op op) {
    return work_of_device(device, [&](int64_t) -> const RankFacts& {
      return rank;
    })(0, {op, 0, 1});
  };
  EXPECT_DOUBLE_EQ(time({.flops = 100}, Op::kForward), 1);
  EXPECT_DOUBLE_EQ(time({.flops = 100}, Op::kBackward), 4);
  EXPECT_DOUBLE_EQ(time({.flops = 100}, Op::kBackwardWeight), 3);
  const Device slow{.flops = 1e9, .memory_bytes = 4};
  EXPECT_DOUBLE_EQ(time(slow, Op::kForward), 10);
  EXPECT_DOUBLE_EQ(time(slow, Op::kOptimizerStep), 30);
  EXPECT_DOUBLE_EQ(time({.flops = 100}, Op::kOptimizerStep), 7);
}

// A block whose experts own themselves, and the head behind it, which is tied
// to an embedding that another stage has too.
TEST(Costs, WeightsAreReadWhoeverOwnsThemAndShardsAreUpdated) {
  RankFacts rank;
  rank.facts.units.resize(4);
  auto& embedding = rank.facts.units[0];
  auto& block = rank.facts.units[1];
  auto& last = rank.facts.units[2];
  auto& experts = rank.facts.units[3];
  embedding.output_bytes = block.output_bytes = last.output_bytes = 10;
  block.forward.matmul = 1;
  block.reads = {1, 3};
  last.reads = {2, 0};
  const auto give = [](UnitFacts& unit, int64_t elements, bool tied) {
    unit.parameters.push_back({.tied = tied,
                               .parameter_bytes = 100 * elements,
                               .read_bytes = 2 * elements,
                               .shard_gradient_bytes = 4 * elements,
                               .updated_bytes = 8 * elements});
  };
  give(embedding, 100, /*tied=*/true);
  give(embedding, 1000, /*tied=*/false);  // of learned positions
  give(block, 3, /*tied=*/false);
  give(last, 5, /*tied=*/false);
  give(experts, 7, /*tied=*/false);
  rank.units.chunks = {{1, 2}};
  for (const auto& unit : rank.facts.units) {
    rank.units.all.push_back({.reads = unit.reads});
  }
  const auto bytes = [&](Op op, int64_t unit) {
    return work_of_device({.flops = 1e9, .memory_bytes = 1},
                          [&](int64_t) -> const RankFacts& { return rank; })(
        0, {op, 0, unit});
  };
  EXPECT_DOUBLE_EQ(bytes(Op::kForward, 1), 10 + 2 * (3 + 7));
  EXPECT_DOUBLE_EQ(bytes(Op::kForward, 2), 10);  // a norm
  EXPECT_DOUBLE_EQ(bytes(Op::kLoss, 2), 2 * 2 * (5 + 100));
  EXPECT_DOUBLE_EQ(bytes(Op::kOptimizerStep, 3), 2 * 8 * 7);
  EXPECT_DOUBLE_EQ(bytes(Op::kOptimizerStep, 0), 2 * 8 * 100);
  EXPECT_DOUBLE_EQ(bytes(Op::kNorm, -1), 4 * (3 + 5 + 7 + 100));
  EXPECT_DOUBLE_EQ(bytes(Op::kClipGradients, -1), 0);
}

TEST(Simulator, BytesOverTime) {
  const RankTimes times{.at = {{0, 1}, {1, 4}}};
  const Memory memory{.behind = {10, 5}, .during = {12, 20}};
  const auto levels = levels_of(times, memory);
  ASSERT_EQ(levels.size(), 4U);
  EXPECT_EQ(levels[2].bytes, 20);
  EXPECT_EQ(levels[3].bytes, 5);
  EXPECT_DOUBLE_EQ(levels[3].time, 4);
}

}  // namespace
}  // namespace tessera::program
