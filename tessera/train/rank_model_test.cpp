#include "tessera/train/rank_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

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
  // Bytes a parameter of what lives between steps.
  double states = 0;
  // Of a step: bytes out of a rank, in units of the parameters, times
  // N / (N - 1): an all_reduce counts twice.
  double traffic = 0;
};

Measured measure(const RunConfig& config, int64_t num_ranks) {
  Measured measured;
  std::mutex mutex;
  comm::run_threads(num_ranks, "shm", [&](comm::Communicator& ranks) {
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
    const auto& parameters = *model.composed().parameters;
    double states = static_cast<double>(parameters.parameter_bytes() +
                                        parameters.gradient_bytes());
    for (const auto& item : model.optimizer().state()) {
      states += static_cast<double>(item.tensor.nbytes());
    }
    const auto count =
        static_cast<double>(models::num_parameters(config.model));
    const std::scoped_lock lock(mutex);
    measured.states = std::max(measured.states, states / count);
    measured.traffic = std::max(measured.traffic, bytes / (4 * count));
  });
  return measured;
}

// Mission's formulas for all in fp32: 16; 8 + 8/N; 4 + 12/N; 16/N bytes a
// parameter.
TEST(RankModel, MemoryOfModelStates) {
  for (const int64_t n : {1, 2, 4, 8}) {
    const double part = 1.0 / static_cast<double>(n);
    const double formulas[] = {16, 8 + 8 * part, 4 + 12 * part, 16 * part};
    for (int64_t stage = 0; stage <= 3; ++stage) {
      const double states = measure(configuration(n, stage), n).states;
      EXPECT_NEAR(states, formulas[stage], 0.02 * formulas[stage])
          << "stage " << stage << " on " << n << " ranks";
    }
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
