// Forwards and activations of every way of recomputing, of n equal units: the
// counts of Chen et al. 2016, arXiv 1604.06174.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "tessera/program/memory.h"
#include "tests/support/programs.h"

namespace tessera::program {
namespace {

constexpr int64_t kKept = 1'000'000;  // bytes of a unit's activations
constexpr int64_t kSizes[] = {4, 16, 64, 100};

struct Counts {
  int64_t forwards = 0;
  int64_t kept = 0;    // units whose activations are there, at most
  int64_t inputs = 0;  // then, beside: of a byte each
};

using Choose = std::function<void(Units& units, int64_t n)>;

Counts count(int64_t n, const Choose& choose) {
  Units units = units_of(n, 0);
  choose(units, n);
  Facts facts;
  facts.units.resize(n);
  for (auto& unit : facts.units) {
    unit = {.input_bytes = 1, .output_bytes = 1, .kept_bytes = kKept};
  }
  facts.units.front().input_bytes = 0;
  facts.loss.input_bytes = 1;
  const Program program = lowered(1, units);
  const Memory memory = memory_of(program, units, facts);
  EXPECT_EQ(memory.behind.back(), 0);
  Counts counts{.kept = memory.peak() / kKept, .inputs = memory.peak() % kKept};
  counts.forwards = std::ranges::count_if(program, [](const Instruction& each) {
    return each.op == Op::kForward || is_again(each.op);
  });
  return counts;
}

int64_t root_of(int64_t n) {
  return std::llround(std::sqrt(static_cast<double>(n)));
}

TEST(Recompute, Nothing) {
  for (int64_t n : kSizes) {
    const Counts counts = count(n, [](Units&, int64_t) {});
    EXPECT_EQ(counts.forwards, n);
    EXPECT_EQ(counts.kept, n);
  }
}

TEST(Recompute, EveryUnit) {
  for (int64_t n : kSizes) {
    const Counts counts = count(n, [](Units& units, int64_t) {
      for (auto& unit : units.all) unit.recomputed_from = unit.reads.front();
    });
    EXPECT_EQ(counts.forwards, 2 * n);
    EXPECT_EQ(counts.kept, 1);
    EXPECT_NEAR(static_cast<double>(counts.inputs), static_cast<double>(n), 1);
  }
}

void by_root(Units& units, int64_t n) {
  const int64_t root = root_of(n);
  for (int64_t unit = 0; unit < n; ++unit) {
    units.all[unit].recomputed_from = unit / root * root;
  }
}

TEST(Recompute, RunsOfRootN) {
  for (int64_t n : kSizes) {
    const int64_t root = root_of(n);
    const Counts all = count(n, by_root);
    EXPECT_EQ(all.forwards, 2 * n);
    EXPECT_EQ(all.kept, root);
    EXPECT_LE(all.inputs, 2 * root + 1);  // of all runs, and inside of one
    const Counts but_last = count(n, [=](Units& units, int64_t) {
      by_root(units, n);
      for (int64_t unit = n - root; unit < n; ++unit) {
        units.all[unit].recomputed_from.reset();
      }
    });
    EXPECT_EQ(but_last.forwards, 2 * n - root);
    EXPECT_EQ(but_last.kept, root);
  }
}

TEST(Recompute, AllAtOnce) {
  for (int64_t n : kSizes) {
    const Counts counts = count(n, [](Units& units, int64_t) {
      for (auto& unit : units.all) unit.recomputed_from = 0;
    });
    EXPECT_EQ(counts.forwards, 2 * n);
    EXPECT_EQ(counts.kept, n);
  }
}

TEST(Recompute, Minimal) {
  for (int64_t n : kSizes) {
    const Counts counts = count(n, [](Units& units, int64_t size) {
      units.minimal = true;
      for (auto& unit : units.all) unit.recomputed_from = 0;
      units.all[size - 1].recomputed_from.reset();
    });
    EXPECT_EQ(counts.forwards, n * (n + 1) / 2);
    EXPECT_EQ(counts.kept, 1);
    EXPECT_LE(counts.inputs, 3);
  }
}

// With m micro-batches in flight a stage holds the input of each, and the
// activations of one.
TEST(Recompute, AStageKeepsItsInputsAlone) {
  constexpr int64_t kUnits = 5, kMicrobatches = 4;
  for (const bool minimal : {false, true}) {
    Units units = units_of(3 * kUnits, 0);
    units.minimal = minimal;
    units.chunks[0] = {5, 6, 7, 8, 9};  // of the middle one of three stages
    Facts facts;
    facts.units.resize(3 * kUnits);
    for (auto& unit : facts.units) {
      unit = {.input_bytes = 1, .output_bytes = 1, .kept_bytes = kKept};
    }
    for (int64_t unit : units.chunks[0]) {
      units.all[unit].recomputed_from = kUnits;
    }
    const schedules::Shape shape{.stages = 3,
                                 .num_microbatches = kMicrobatches};
    const Program program = passes::lower(
        schedules::step(schedules::named("gpipe"), shape, /*stage=*/1), units);
    const Memory memory = memory_of(program, units, facts);
    EXPECT_EQ(memory.behind.back(), 0);
    EXPECT_EQ(memory.peak() / kKept, minimal ? 1 : kUnits);
    EXPECT_LE(memory.peak() % kKept, kMicrobatches + 2 * kUnits + 3);
    const auto first = std::ranges::find_if(
        program, [](const Instruction& each) { return is_again(each.op); });
    // Inputs, and what is on its way meanwhile.
    EXPECT_LE(memory.behind.at(first - program.begin() - 1), kMicrobatches + 3);
  }
}

}  // namespace
}  // namespace tessera::program
