// Facts of a decoder beside what a rank does: see tests/facts/player.h.
#include "tessera/parallel/facts.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cctype>
#include <cmath>

#include "tessera/optim/optimizer.h"
#include "tessera/wrappers/moe.h"
#include "tests/facts/player.h"

namespace tessera {
namespace {

using mesh::Axis;
using program::InnerCollective;
using program::UnitFacts;
using testing::Case;
using testing::Measured;
using testing::Player;

// The largest errors of a case.
struct Errors {
  double alive = 0, peak = 0, states = 0;
};

double error_of(int64_t said, int64_t found) {
  if (said == found) return 0;
  return std::abs(static_cast<double>(said - found)) /
         static_cast<double>(std::max<int64_t>(found, 1));
}

void note(double& worst, int64_t said, int64_t found, const char* what,
          const std::string& where, double most) {
  const double error = error_of(said, found);
  worst = std::max(worst, error);
  EXPECT_LE(error, most) << what << " of " << where << ": said " << said
                         << ", found " << found;
}

void compare_states(const Player& player, const program::Facts& facts,
                    const std::string& where, Errors& errors) {
  const auto& composed = player.composed();
  std::vector<optim::FlatSegment> segments;
  for (const auto& parameter : composed.parameters->parameters()) {
    segments.push_back({.name = parameter.name,
                        .parameter = parameter.shard,
                        .gradient = parameter.gradient});
  }
  const int64_t before = monitor::tensor_bytes().now;
  const auto optimizer = optim::make_optimizer({}, std::move(segments));
  const int64_t kept = monitor::tensor_bytes().now - before;
  program::ParameterFacts sum;
  for (const auto& each : player.held(facts)) {
    sum.parameter_bytes += each.parameter_bytes;
    sum.gradient_bytes += each.gradient_bytes;
    sum.optimizer_bytes += each.optimizer_bytes;
  }
  using monitor::tensor_bytes;
  note(errors.states, sum.parameter_bytes,
       tensor_bytes(MemoryKind::kParameters).now, "parameters", where, 0.05);
  note(errors.states, sum.gradient_bytes,
       tensor_bytes(MemoryKind::kGradients).now, "gradients", where, 0.05);
  note(errors.states, sum.optimizer_bytes, kept, "optimizer", where, 0.05);
}

// What gathers and reductions of all parameters moved, by verb.
void compare_traffic(Player& player, const program::Facts& facts,
                     const std::string& where) {
  std::map<std::string, int64_t> said, found;
  const auto count = [&](const char* verb, int64_t bytes) {
    if (bytes > 0) said[verb] += bytes;
  };
  for (const auto& each : player.held(facts)) {
    count("all_gather", each.gather_message_bytes);
    count("reduce_scatter", each.reduce_message_bytes);
    count("all_reduce", each.sum_message_bytes);
  }
  for (const auto& [key, calls] : player.move_parameters()) {
    found[key.second] += calls.second;
  }
  EXPECT_EQ(said, found) << where;
}

Measured::Calls calls_of(const std::vector<InnerCollective>& collectives,
                         const mesh::DeviceMesh& mesh,
                         const mesh::Coord& coord) {
  Measured::Calls all;
  for (const auto& each : collectives) {
    std::vector<mesh::DeviceMesh::Along> along;
    for (Axis axis : each.axes) {
      along.push_back({axis, {}});
      for (int64_t at = 0; at < mesh.degree(axis); ++at) {
        along.back().coords.push_back(at);
      }
    }
    auto& sum = all[{mesh.ranks_at(coord, along), each.verb}];
    sum.first += 1;
    sum.second += each.bytes;
  }
  return all;
}

void compare(const UnitFacts& said, const Measured& found, const Player& player,
             const std::string& where, double peak, Errors& errors) {
  const auto& composed = player.composed();
  EXPECT_EQ(said.forward, found.forward) << where;
  program::Flops backward = said.backward_input;
  backward.matmul += said.backward_weight.matmul;
  EXPECT_EQ(backward, found.backward) << where;
  EXPECT_EQ(calls_of(said.forward_collectives, composed.mesh, composed.coord),
            found.forward_calls)
      << where;
  EXPECT_EQ(calls_of(said.backward_collectives, composed.mesh, composed.coord),
            found.backward_calls)
      << where;
  const int64_t output = said.output_bytes, input = said.input_bytes;
  note(errors.alive, output + said.kept_bytes, found.alive,
       "bytes after forward", where, 0.05);
  note(errors.alive, input, found.after, "bytes after backward", where, 0.05);
  note(errors.peak, input + said.forward_peak_bytes, input + found.forward_peak,
       "forward's peak", where, peak);
  note(errors.peak, input + said.plain_forward_peak_bytes,
       input + found.plain_peak, "plain forward's peak", where, peak);
  const int64_t held = input + said.kept_bytes + 2 * output;
  note(errors.peak, held + said.backward_peak_bytes,
       input + output + found.alive + found.backward_peak, "backward's peak",
       where, peak);
}

void compare_loss(const UnitFacts& said, const Measured& found,
                  const Player& player, const std::string& where,
                  Errors& errors) {
  const auto& composed = player.composed();
  EXPECT_EQ(calls_of(said.forward_collectives, composed.mesh, composed.coord),
            found.forward_calls)
      << where;
  program::Flops all = said.forward;
  all.matmul += said.backward_input.matmul + said.backward_weight.matmul;
  EXPECT_EQ(all, found.forward) << where;
  const int64_t input = said.input_bytes;
  note(errors.alive, input, input + found.alive, "bytes after the loss", where,
       0.05);
  note(errors.peak, input + said.forward_peak_bytes, input + found.forward_peak,
       "the loss's peak", where, 0.03);
  note(errors.peak, input + said.plain_forward_peak_bytes,
       input + found.plain_peak, "its peak in an evaluation", where, 0.03);
}

// oneDNN's products are no operators that could be counted, and take scratch,
// which facts do not count: LibTorch's own in their place.
class FactsOf : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { at::globalContext().setUserEnabledMkldnn(false); }
  void TearDown() override { at::globalContext().setUserEnabledMkldnn(true); }
};

TEST_P(FactsOf, UnitsAreWhatARankDoes) {
  const Case& each = GetParam();
  monitor::count_tensor_bytes();
  at::set_num_threads(1);
  const monitor::RankMemory memory;
  Player player(each);
  const program::Facts facts = player.facts();
  Errors errors;
  compare_states(player, facts, each.name, errors);
  player.gather();
  for (const auto& chunk : player.composed().units.chunks) {
    for (int64_t unit : chunk) {
      EXPECT_EQ(facts.units[unit].reads,
                player.composed().units.all[unit].reads);
      player.run(unit);  // what is made at the first use
      compare(facts.units[unit], player.run(unit), player,
              std::string(each.name) + ", unit " + std::to_string(unit),
              each.peak, errors);
    }
  }
  if (player.has_head()) {
    compare_loss(facts.loss, player.run_loss(), player, each.name, errors);
  }
  compare_traffic(player, facts, each.name);
  RecordProperty("alive", std::to_string(errors.alive));
  RecordProperty("peak", std::to_string(errors.peak));
  RecordProperty("states", std::to_string(errors.states));
  std::printf("%-24s alive %5.2f%%  peak %5.2f%%  states %5.2f%%\n", each.name,
              100 * errors.alive, 100 * errors.peak, 100 * errors.states);
}

TEST_P(FactsOf, AttentionsCoreIsComputedAgain) {
  const Case& each = GetParam();
  monitor::count_tensor_bytes();
  at::set_num_threads(1);
  const monitor::RankMemory memory;
  Player player(each);
  const auto& composed = player.composed();
  const program::Facts facts = player.facts("selective");
  player.gather();
  Errors errors;
  for (const auto& chunk : composed.units.chunks) {
    for (int64_t unit : chunk) {
      if (unit == 0 || unit == each.model.num_blocks() + 1) continue;
      player.run_core_again(unit);  // what is made at the first use
      const Measured found = player.run_core_again(unit);
      const UnitFacts& said = facts.units[unit];
      EXPECT_EQ(said.again.flops, found.backward) << each.name;
      EXPECT_EQ(calls_of(said.again.collectives, composed.mesh, composed.coord),
                found.backward_calls)
          << each.name;
      note(errors.alive, said.output_bytes + said.kept_bytes, found.alive,
           "bytes after forward", each.name, 0.05);
      note(errors.peak, said.input_bytes + said.forward_peak_bytes,
           said.input_bytes + found.forward_peak, "forward's peak", each.name,
           each.peak);
      note(errors.alive, said.again.kept_bytes, found.after,
           "bytes after the core", each.name, 0.05);
      note(errors.peak, found.alive + said.again.peak_bytes,
           found.alive + found.backward_peak, "the core's peak", each.name,
           each.peak);
    }
  }
}

// The same bytes one behind the other: a unit's output is the next one's input.
TEST_P(FactsOf, UnitsAddUp) {
  const Case& each = GetParam();
  // Rows from ranks that are made up come evenly to even rows alone.
  if (each.degrees.ep > 1) return;
  monitor::count_tensor_bytes();
  at::set_num_threads(1);
  const monitor::RankMemory memory;
  Player player(each);
  player.gather();
  player.run_all();  // what is made at the first use
  const std::vector<int64_t> found = player.run_all();
  const program::Facts facts = player.facts();
  std::vector<const UnitFacts*> units;
  for (const auto& chunk : player.composed().units.chunks) {
    for (int64_t unit : chunk) units.push_back(&facts.units[unit]);
  }
  std::vector<int64_t> said;
  const bool from_ids = units.front()->input_bytes == 0;
  const int64_t ids = each.options.samples * each.options.seq_len * 8;
  int64_t sum = from_ids ? ids / each.degrees.cp : units.front()->input_bytes;
  for (const auto* unit : units) {
    said.push_back(sum += unit->kept_bytes + unit->output_bytes);
  }
  for (size_t i = units.size(); i-- > 0;) {
    sum -= units[i]->kept_bytes + units[i]->output_bytes;
    // Of the first unit its own input is replaced.
    said.push_back(i == 0 ? sum : sum + units[i]->input_bytes);
  }
  ASSERT_EQ(said.size(), found.size());
  for (size_t i = 0; i < said.size(); ++i) {
    EXPECT_LE(error_of(said[i], found[i]), 0.05)
        << each.name << ", instruction " << i << ": said " << said[i]
        << ", found " << found[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, FactsOf, ::testing::ValuesIn(testing::cases()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           for (char& c : name) c = std::isalnum(c) ? c : '_';
                           return name;
                         });

// Worked example 3: of k experts a token, however many there are.
TEST(Facts, ExpertsOfATokenMultiplyAlike) {
  static constexpr int64_t kWide = 2048, kTokens = 4;
  for (const int64_t experts : {8, 32}) {
    comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
      MoE moe(
          kWide, experts, /*k=*/2,
          [] { return torch::nn::Linear(kWide, kWide); },
          mesh::DeviceMesh({}, 1), ranks);
      const at::NoGradGuard no_grad;
      const testing::FlopCounter counter;
      moe->forward(at::randn({kTokens, kWide}));
      const int64_t gate = 2 * kWide * experts;
      EXPECT_EQ(counter.take().matmul, kTokens * (16'777'216 + gate));
    });
  }
}

// Worked example 5: a product in two chunks, or in three.
TEST(Facts, ChunksOfAProductMultiplyAsMuch) {
  const at::Tensor a = at::randn({1000, 512}), b = at::randn({512, 256});
  for (const auto& rows :
       {std::vector<int64_t>{500, 500}, std::vector<int64_t>{334, 334, 332}}) {
    const testing::FlopCounter counter;
    for (const at::Tensor& chunk : a.split_with_sizes(rows)) chunk.mm(b);
    EXPECT_EQ(counter.take().matmul, 262'144'000);
  }
}

}  // namespace
}  // namespace tessera
