#include "tessera/parallel/pipeline/cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

namespace tessera::parallel::pipeline {
namespace {

using program::Pipeline;
using program::Placement;
using Split = std::vector<int64_t>;

UnitCosts even_costs(int64_t layers, double head = 0) {
  UnitCosts costs{.time = std::vector<double>(layers + 2, 1.0)};
  costs.time.front() = 0;
  costs.time.back() = head;
  return costs;
}

// What the most loaded rank takes.
double longest(const UnitCosts& costs, const CutRules& rules,
               const Split& split) {
  auto loads = loads_of(costs, rules.pipeline, split);
  for (size_t stage = 0; stage < rules.speeds.size(); ++stage) {
    loads[stage] /= rules.speeds[stage];
  }
  return std::ranges::max(loads);
}

// All that there are.
void for_each_split(int64_t layers, const CutRules& rules,
                    const std::function<void(const Split&)>& work) {
  const int64_t runs = rules.pipeline.num_runs();
  Split split;
  const std::function<void(int64_t)> fill = [&](int64_t left) {
    const auto run = std::ssize(split);
    const bool is_end = run == 0 || run == runs - 1;
    const int64_t least = is_end && rules.bare_ends ? 0 : 1;
    if (run == runs - 1) {
      if (left < least) return;
      split.push_back(left);
      work(split);
      split.pop_back();
      return;
    }
    for (int64_t take = least; take <= left; ++take) {
      split.push_back(take);
      fill(left - take);
      split.pop_back();
    }
  };
  fill(layers);
}

double best_of_all(const UnitCosts& costs, const CutRules& rules) {
  double best = std::numeric_limits<double>::infinity();
  for_each_split(std::ssize(costs.time) - 2, rules, [&](const Split& split) {
    best = std::min(best, longest(costs, rules, split));
  });
  return best;
}

TEST(Cut, IsTheBestOfAllCuts) {
  std::mt19937_64 random(7);
  const auto number = [&](double from, double to) {
    return std::uniform_real_distribution<double>(from, to)(random);
  };
  for (int i = 0; i < 300; ++i) {
    const int64_t stages = 2 + i % 4, layers = stages + i % 7;
    CutRules rules{.pipeline = {.stages = stages}, .bare_ends = i % 2 == 0};
    UnitCosts costs;
    for (int64_t unit = 0; unit < layers + 2; ++unit) {
      costs.time.push_back(number(0.1, 3));
    }
    for (int64_t stage = 0; stage < stages && i % 3 > 0; ++stage) {
      rules.speeds.push_back(number(0.2, 1));
    }
    const Split split = balanced_split(costs, rules);
    EXPECT_NEAR(longest(costs, rules, split), best_of_all(costs, rules), 1e-9);
  }
}

TEST(Cut, AlikeIsEven) {
  for (int64_t stages = 1; stages <= 5; ++stages) {
    for (int64_t layers = stages; layers <= 12; ++layers) {
      Split even;
      for (int64_t i = 0; i < stages; ++i) {
        even.push_back(layers / stages + (i < layers % stages ? 1 : 0));
      }
      EXPECT_EQ(balanced_split(even_costs(layers), {{.stages = stages}}), even);
    }
  }
}

TEST(Cut, LayersLeaveTheHeadAndSlowStages) {
  // A head of three layers.
  EXPECT_EQ(balanced_split(even_costs(9, 3), {{.stages = 3}}),
            (Split{4, 4, 1}));
  EXPECT_EQ(balanced_split(even_costs(6), {{.stages = 2}, {1, 0.5}}),
            (Split{4, 2}));
  EXPECT_EQ(balanced_split(even_costs(7), {{.stages = 3}, {1, 0.5, 1}}),
            (Split{3, 1, 3}));
  // One at least, however slow; but a head may be alone.
  EXPECT_EQ(balanced_split(even_costs(6), {{.stages = 2}, {1, 0.001}}),
            (Split{5, 1}));
  EXPECT_EQ(balanced_split(even_costs(6, 9),
                           {.pipeline = {.stages = 2}, .bare_ends = true}),
            (Split{6, 0}));
}

// The last part has the most to do whatever the others have: of these the first
// holds the most micro-batches.
TEST(Cut, EquallyGoodOnesLeaveTheFullestRankTheLeast) {
  UnitCosts costs = even_costs(7, 5);
  costs.state_bytes.assign(9, 1.0);
  costs.kept_bytes.assign(9, 1.0);
  const CutRules rules{.pipeline = {.stages = 3}, .bare_ends = true};
  EXPECT_EQ(balanced_split(costs, rules), (Split{2, 5, 0}));
  // Where the stages behind the first hold more, or less.
  costs.kept_bytes.assign(9, 0.0);
  costs.later_state_bytes.assign(9, 3.0);
  EXPECT_EQ(balanced_split(costs, rules), (Split{5, 2, 0}));
  costs.later_state_bytes.assign(9, 1.0);
  costs.state_bytes.assign(9, 2.0);
  EXPECT_EQ(balanced_split(costs, rules), (Split{2, 5, 0}));
  costs.kept_bytes.clear();
  costs.state_bytes.clear();
  costs.later_state_bytes.clear();
  EXPECT_EQ(balanced_split(costs, rules), (Split{4, 3, 0}));
}

// Ranks of several parts are as even as any cut makes them, where layers cost
// the same.
TEST(Cut, RanksOfSeveralPartsAreEven) {
  for (const auto& [pipeline, name] :
       {std::pair(Pipeline{2, 2, Placement::kRoundRobin}, "interleaved"),
        {{3, 2, Placement::kRoundRobin}, "interleaved"},
        {{2, 2, Placement::kV}, "V"},
        {{3, 2, Placement::kV}, "V"},
        {{4, 2, Placement::kMirrored}, "mirrored"}}) {
    for (const double head : {0.0, 1.0, 2.5}) {
      for (const bool is_uneven : {false, true}) {
        for (int64_t layers = pipeline.num_runs(); layers <= 10; ++layers) {
          CutRules rules{.pipeline = pipeline, .bare_ends = head > 0};
          if (is_uneven) {
            rules.speeds.assign(pipeline.stages, 1);
            rules.speeds.back() = 0.5;
          }
          const auto costs = even_costs(layers, head);
          const Split split = balanced_split(costs, rules);
          EXPECT_NEAR(longest(costs, rules, split), best_of_all(costs, rules),
                      1e-9)
              << name << " " << layers << " layers, head " << head;
        }
      }
    }
  }
}

// Where two ranks share the most, a layer that leaves one of them is no step
// back.
TEST(Cut, RanksOfSeveralPartsLeaveAPlateau) {
  const CutRules rules{.pipeline = {3, 2, Placement::kRoundRobin},
                       .speeds = {0.8, 0.8, 0.5}};
  const auto costs = even_costs(18);
  EXPECT_NEAR(longest(costs, rules, balanced_split(costs, rules)), 8.75, 1e-9);
}

// Of n units in a part n (n - 1) / 2 run again, and n more where other stages
// follow.
TEST(Cut, ReplaysGrowWithThePart) {
  UnitCosts costs = even_costs(12, 36);
  const CutRules rules{.pipeline = {.stages = 2}};
  EXPECT_EQ(balanced_split(costs, rules), (Split{11, 1}));
  costs.replay.assign(14, 1.0);
  costs.replay.front() = costs.replay.back() = 0;
  EXPECT_EQ(loads_of(costs, rules.pipeline, {8, 4}),
            (std::vector<double>{8 + 36, 4 + 36 + 10}));
  EXPECT_EQ(balanced_split(costs, rules), (Split{8, 4}));
}

TEST(Cut, LoadsAreOfAllPartsOfARank) {
  const auto loads =
      loads_of(even_costs(6, 3), {2, 2, Placement::kV}, {2, 1, 1, 2});
  EXPECT_EQ(loads, (std::vector<double>{2 + 2 + 3, 2}));
}

}  // namespace
}  // namespace tessera::parallel::pipeline
