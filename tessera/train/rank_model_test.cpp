#include "tessera/train/rank_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "tessera/monitor/memory.h"
#include "tessera/train/preflight.h"
#include "tessera/train/verify.h"

namespace tessera::train {
namespace {

RunConfig configuration(int64_t ranks, int64_t zero_stage) {
  RunConfig config;
  config.data.train = {"random tokens"};
  config.data.seq_len = 16;
  config.model.layers = 4;
  config.model.hidden = 64;
  config.model.heads = 8;
  config.model.vocab = 512;
  config.model.tie_embeddings = false;
  config.batch.global = ranks;
  config.mesh.dp = ranks;
  config.zero.stage = zero_stage;
  config.precision.compute = "fp32";
  complete(config, ranks);
  return config;
}

data::Batch zeros(int64_t count, int64_t length) {
  const at::Tensor ids = at::zeros({count, length}, at::kLong);
  return {ids, ids};
}

struct Measured {
  // Bytes a parameter of what lives between steps, by the allocator that counts
  // them.
  double parameters = 0, gradients = 0, optimizer = 0;
  double states() const { return parameters + gradients + optimizer; }
  // Of a step: bytes out of a rank, in units of the parameters, times
  // N / (N - 1): an all_reduce counts twice.
  double traffic = 0;
};

// A group's thread lets go of an operation's tensors before the next one.
void settle(comm::Communicator& ranks) {
  std::vector<comm::Work> works;
  for (auto* group : ranks.groups()) {
    works.push_back(group->all_reduce(at::zeros({1}, at::kDouble)));
  }
  for (auto& work : works) work.wait();
}

Measured measure(const RunConfig& config, int64_t num_ranks) {
  monitor::count_tensor_bytes();
  Measured measured;
  std::mutex mutex;
  comm::run_threads(num_ranks, "shm", [&](comm::Communicator& ranks) {
    const monitor::RankMemory memory;
    RankModel model(config, ranks);
    const auto input = step_input(config, 1e-3, [&](int64_t, int64_t count) {
      return zeros(count, config.data.seq_len);
    });
    model.step(input);  // opens what is opened on first use
    for (auto* group : ranks.groups()) group->reset_stats();
    model.step(input);
    double bytes = 0;
    for (auto* group : ranks.groups()) {
      if (group->name() == "world") continue;  // the norm
      for (const auto& verb : group->stats()) {
        const double times = verb.verb == "all_reduce" ? 2 : 1;
        bytes += times * static_cast<double>(verb.bytes);
      }
    }
    settle(ranks);
    const auto count =
        static_cast<double>(models::num_parameters(config.model));
    const std::scoped_lock lock(mutex);
    const auto take = [&](double& most, MemoryKind kind) {
      const auto held = static_cast<double>(monitor::tensor_bytes(kind));
      most = std::max(most, held / count);
    };
    take(measured.parameters, MemoryKind::kParameters);
    take(measured.gradients, MemoryKind::kGradients);
    take(measured.optimizer, MemoryKind::kOptimizer);
    measured.traffic = std::max(measured.traffic, bytes / (4 * count));
  });
  return measured;
}

// Bytes a parameter of weights, gradients and AdamW's tensors, in all three
// ways to hold them: all in fp32 16; 8 + 8/N; 4 + 12/N; 16/N. In bf16, fp32
// masters among the optimizer's, 16; 4 + 12/N; 2 + 14/N; 16/N; with gradients
// in fp32 two more for each gradient.
TEST(RankModel, MemoryOfModelStates) {
  struct Kind {
    const char *compute, *reduce;
    double weight, gradient, optimizer;
  };
  for (const Kind& kind :
       {Kind{"fp32", "auto", 4, 4, 8}, Kind{"bf16", "bf16", 2, 2, 12},
        Kind{"bf16", "auto", 2, 4, 12}}) {
    for (const int64_t n : {1, 2, 4, 8}) {
      for (int64_t stage = 0; stage <= 3; ++stage) {
        RunConfig config = configuration(n, stage);
        config.precision = {.compute = kind.compute, .reduce = kind.reduce};
        const Measured found = measure(config, n);
        const auto expect = [&](double measured, double whole, int64_t from) {
          const double formula =
              stage >= from ? whole / static_cast<double>(n) : whole;
          EXPECT_NEAR(measured, formula, 0.02 * formula)
              << kind.compute << " reduced in " << kind.reduce << ", stage "
              << stage << " on " << n << " ranks";
          return formula;
        };
        const double states = expect(found.parameters, kind.weight, 3) +
                              expect(found.gradients, kind.gradient, 2) +
                              expect(found.optimizer, kind.optimizer, 1);
        EXPECT_NEAR(found.states(), states, 0.02 * states);
      }
    }
  }
}

// Layouts of experts, data, tensor parallelism and ZeRO on four devices: which
// ranks are in which groups, that the model is that of one rank, and the bytes
// of model states on a device, 16 a parameter, where the trunk has B and all
// experts together X parameters.
TEST(RankModel, LayoutsOfExperts) {
  struct Layout {
    int64_t experts, dp, tp, ep, zero_stage, expert_stage;
    const char* groups;
    double trunk, of_experts;  // bytes of a B, of an X
  };
  const Layout layouts[] = {{8, 4, 1, 2, 0, -1,
                             "groups      dp_replicate {0,1,2,3}\n"
                             "            expert_dp {0,2} {1,3}\n"
                             "            ep {0,1} {2,3}\n"
                             "            experts 0-3 on ranks 0, 2\n"
                             "            experts 4-7 on ranks 1, 3\n",
                             16, 8},
                            {4, 2, 2, 2, 0, -1,
                             "groups      dp_replicate {0,2} {1,3}\n"
                             "            tp {0,1} {2,3}\n"
                             "            expert_dp {0,2} {1,3}\n"
                             "            ep {0,1} {2,3}\n"
                             "            experts 0-1 on ranks 0, 2\n"
                             "            experts 2-3 on ranks 1, 3\n",
                             8, 8},
                            {4, 4, 1, 2, 3, 0,
                             "groups      dp_shard {0,1,2,3}\n"
                             "            expert_dp {0,2} {1,3}\n"
                             "            ep {0,1} {2,3}\n"
                             "            experts 0-1 on ranks 0, 2\n"
                             "            experts 2-3 on ranks 1, 3\n",
                             4, 8},
                            {4, 4, 1, 2, 3, 3,
                             "groups      dp_shard {0,1,2,3}\n"
                             "            expert_dp {0,2} {1,3}\n"
                             "            ep {0,1} {2,3}\n"
                             "            experts 0-1 on ranks 0, 2\n"
                             "            experts 2-3 on ranks 1, 3\n",
                             4, 4},
                            {8, 4, 1, 4, 0, -1,
                             "groups      dp_replicate {0,1,2,3}\n"
                             "            ep {0,1,2,3}\n"
                             "            experts 0-1 on ranks 0\n"
                             "            experts 2-3 on ranks 1\n"
                             "            experts 4-5 on ranks 2\n"
                             "            experts 6-7 on ranks 3\n",
                             16, 4}};
  for (const Layout& layout : layouts) {
    RunConfig config = configuration(1, 0);
    config.model.family = "mixtral";
    config.model.ffn = 64;
    config.model.moe.experts = layout.experts;
    config.mesh = {};
    config.mesh.dp = layout.dp;
    config.mesh.tp = layout.tp;
    config.mesh.ep = layout.ep;
    config.batch = {.global = 4};
    config.zero.stage = layout.zero_stage;
    config.zero.expert_stage = layout.expert_stage;
    complete(config, 4);
    const std::string plan = describe_plan(config);
    EXPECT_NE(plan.find(std::string("\n") + layout.groups + "batch"),
              std::string::npos)
        << plan;
    const auto experts =
        static_cast<double>(models::num_expert_parameters(config.model));
    const double trunk =
        static_cast<double>(models::num_parameters(config.model)) - experts;
    const double expected = layout.trunk * trunk + layout.of_experts * experts;
    const double measured = measure(config, 4).states() * (trunk + experts);
    EXPECT_NEAR(measured, expected, 0.02 * expected) << plan;
    EXPECT_TRUE(verify(shrunk(config, 4), 4, /*steps=*/2).equal()) << plan;
  }
}

// In units of the parameters: 2 for stages 0, 1 and 2; 3 for stage 3, or 2 when
// gathered parameters are kept until the backward.
TEST(RankModel, TrafficOfAStep) {
  for (const int64_t n : {2, 4}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      const double units = stage == 3 ? 3 : 2;
      EXPECT_NEAR(measure(configuration(n, stage), n).traffic, units,
                  0.01 * units)
          << "stage " << stage << " on " << n << " ranks";
    }
    RunConfig kept = configuration(n, 3);
    kept.zero.reshard_after_forward = false;
    EXPECT_NEAR(measure(kept, n).traffic, 2, 0.02);
  }
}

// Bytes out of rank 0 in a step, by group: what docs/parallelism.md says.
std::map<std::string, double> bytes_out(const RunConfig& config,
                                        int64_t num_ranks) {
  std::map<std::string, double> bytes;
  comm::run_threads(num_ranks, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    const auto input = step_input(config, 1e-3, [&](int64_t, int64_t count) {
      return zeros(count, config.data.seq_len);
    });
    model.step(input);
    for (auto* group : ranks.groups()) group->reset_stats();
    model.step(input);
    if (ranks.rank() != 0) return;
    for (auto* group : ranks.groups()) {
      const auto n = static_cast<double>(group->size());
      for (const auto& verb : group->stats()) {
        const double share = verb.verb == "all_reduce" ? 2 * (n - 1) / n
                             : verb.verb == "send"     ? 1
                             : verb.verb == "recv"     ? 0
                                                       : (n - 1) / n;
        bytes[group->name()] += share * static_cast<double>(verb.bytes);
      }
    }
  });
  return bytes;
}

TEST(RankModel, BytesByAxis) {
  constexpr int64_t kRanks = 4, kMicrobatches = 2;
  RunConfig base = configuration(1, 0);
  base.batch = {.global = 2 * kMicrobatches, .micro = 2};
  const double f = (kRanks - 1.0) / kRanks, m = kMicrobatches;
  const auto layers = static_cast<double>(base.model.layers);
  // Of a micro-batch: tokens, hidden states, keys and values (also queries
  // twice: there are as many heads).
  const double tokens = 2.0 * static_cast<double>(base.data.seq_len);
  const double hidden = 4 * tokens * static_cast<double>(base.model.hidden);
  const auto expect = [&](RunConfig config, const char* group, double formula) {
    config.mesh.dp = 1;
    complete(config, kRanks);
    EXPECT_NEAR(bytes_out(config, kRanks)[group], formula, 0.01 * formula)
        << group;
  };

  RunConfig tensor = base;
  tensor.mesh.tp = kRanks;
  expect(tensor, "tp",
         m * 2 * f * ((4 * layers + 2) * hidden + 3 * 4 * tokens));
  tensor.tensor.sequence_parallel = true;
  const double norms = (2 * layers + 1) * 4 * 64;
  expect(
      tensor, "tp",
      m * f * ((8 * layers + 4) * hidden + 2 * 3 * 4 * tokens) + 2 * f * norms);

  RunConfig context = base;
  context.mesh.cp = kRanks;
  const double here = 2 * hidden / kRanks;  // keys and values
  const double sum =
      2 * f * 4 * static_cast<double>(models::num_parameters(base.model));
  context.context.method = "ring";
  expect(context, "cp", sum + m * layers * (3 * kRanks - 2) * here);
  context.context.method = "ulysses";
  expect(context, "cp", sum + m * layers * 2 * f * 2 * here);
  context.context.method = "allgather";
  expect(context, "cp", sum + m * layers * 2 * (kRanks - 1) * here);

  RunConfig pipeline = base;
  pipeline.mesh.pp = kRanks;
  expect(pipeline, "pp",
         m * hidden);  // the first stage has no gradient to send

  // Every token goes to every expert: the rows are shared out evenly.
  RunConfig experts = base;
  experts.model.family = "mixtral";
  experts.model.ffn = 64;
  experts.model.moe.experts = experts.model.moe.top_k = kRanks;
  experts.mesh.tp = experts.mesh.ep = kRanks;
  experts.tensor.sequence_parallel = true;
  expect(
      experts, "ep",
      m * layers * f * (4 * hidden / kRanks * kRanks + 8.0 * kRanks * kRanks));
}

TEST(Verify, AMeshEqualsOneRank) {
  RunConfig config = configuration(2, 1);
  config.mesh.tp = 2;
  config.mesh.pp = 2;
  config.batch.global = 8;
  config.batch.micro = 1;
  const Verification found = verify(shrunk(config, 8), 8);
  EXPECT_TRUE(found.equal());
  EXPECT_LT(found.gradients, 1e-12);
  EXPECT_GT(found.gradients, 0);  // rounding: they did not share a tensor
}

TEST(Verify, NamesParameterAxisAndFactor) {
  const Difference twice{
      "blocks.3.mlp_norm.weight", "gradient", 1, "tp=1", 1.0, 2.0, {"tp"}};
  EXPECT_EQ(twice.describe(),
            "blocks.3.mlp_norm.weight: gradient 2.000 times too large: summed "
            "twice over tp? (at tp=1) [step 1]");
  const Difference quarter{"head.weight", "gradient",        1, "", 0.75,
                           0.25,          {"dp_shard", "cp"}};
  EXPECT_EQ(quarter.describe(),
            "head.weight: gradient 4.000 times too small: divided, or not "
            "summed, over dp_shard or cp? [step 1]");
}

// Layers with experts stay, and widths that experts' shards do not divide.
TEST(Verify, ShrinkKeepsExperts) {
  RunConfig config = configuration(1, 0);
  config.model.family = "mixtral";
  config.model.layers = 12;
  config.model.ffn = 65;
  config.model.moe.every = 3;
  config.mesh = {};
  config.mesh.dp = config.mesh.ep = 2;
  config.batch = {.global = 4};
  complete(config, 2);
  EXPECT_EQ(shrunk(config, 2).model.layers_with_experts(), 1);
  config.mesh.ep = 1;
  config.zero.expert_stage = 3;
  complete(config, 2);
  EXPECT_EQ(shrunk(config, 2).model.ffn % 2, 1);
}

// Sizes that do not divide by the mesh still do not.
TEST(Verify, ShrinkKeepsWhatDoesNotDivide) {
  RunConfig config = configuration(3, 3);
  config.model.vocab = 50257;
  config.model.hidden = 320;
  const RunConfig small = shrunk(config, 3);
  EXPECT_LT(small.model.vocab, 64);
  EXPECT_EQ(small.model.vocab % 3, 50257 % 3);
  EXPECT_LT(small.model.hidden, 32);
  EXPECT_EQ(small.model.hidden % 3, 320 % 3);
}

}  // namespace
}  // namespace tessera::train
