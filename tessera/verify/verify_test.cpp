#include "tessera/verify/verify.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/small_run.h"

namespace tessera::verify {
namespace {

using engine::RunConfig;
using testing::small_run;

TEST(Verify, AMeshEqualsOneRank) {
  RunConfig config = small_run(2, 1);
  config.mesh.tp = 2;
  config.mesh.pp = 2;
  config.batch.global = 8;
  config.batch.micro = 1;
  const Verification found = verify(shrunk(config, 8), 8);
  EXPECT_TRUE(found.equal());
  EXPECT_LT(found.gradients, 1e-12);
  EXPECT_GT(found.gradients, 0);  // rounding: they did not share a tensor
}

// Batches overlap there, and on one rank nothing does.
TEST(Verify, DelayedStepsEqualThoseOfOneRank) {
  for (const int64_t zero_stage : {0, 3}) {
    RunConfig config = small_run(2, zero_stage);
    config.mesh.pp = 2;
    config.pipeline.schedule = "pipedream_2bw";
    config.batch.global = 8;
    config.batch.micro = 1;
    complete(config, 4);
    const Verification found = verify(shrunk(config, 4), 4, /*steps=*/4);
    EXPECT_TRUE(found.equal());
    EXPECT_GT(found.gradients, 0);
  }
}

// The bias of k has no gradient but rounding, of which lion makes whole steps.
TEST(Verify, AnOptimizerBySignIsNotBlamedForChance) {
  RunConfig config = small_run(2, 0);
  config.model.family = "gpt2";
  config.mesh.tp = 2;
  config.optimizer.type = "lion";
  EXPECT_TRUE(verify(shrunk(config, 4), 4).equal());
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

TEST(Verify, AnyLayoutOfExpertsEqualsOneRank) {
  for (const auto& layout : testing::kExpertLayouts) {
    const RunConfig config = shrunk(testing::run_of_experts(layout), 4);
    EXPECT_TRUE(verify(config, 4, /*steps=*/2).equal()) << layout.groups;
  }
}

TEST(Verify, ShrinkLoadsNoWeightsOfTheWholeModel) {
  RunConfig config = small_run(2, 0);
  config.model.layers = 8;
  config.model.from = "a folder that is not there";
  config.model.load_weights = true;
  config.model.lora = {.rank = 4, .from = "another one"};
  EXPECT_TRUE(verify(shrunk(config, 2), 2).equal());
}

// Of layers that are gone, and of all of a kind.
TEST(Verify, ShrinkKeepsAdaptersOfLayersThatStay) {
  RunConfig config = small_run(2, 0);
  config.model.layers = 8;
  config.model.lora.rank = 4;
  config.model.lora.targets = {"blocks.7.attention.q", "down"};
  complete(config, 2);
  const RunConfig small = shrunk(config, 2);
  EXPECT_EQ(small.model.lora.targets, (std::vector<std::string>{"down"}));
  EXPECT_TRUE(verify(small, 2).equal());
  config.model.lora.targets = {"blocks.7.attention.q"};
  EXPECT_TRUE(shrunk(config, 2).model.lora.targets.empty());
}

TEST(Verify, ShrinkKeepsABatchThatRanksDoNotDivide) {
  RunConfig config = small_run(3, 1);
  config.mesh.pp = 2;
  for (const auto& [global, micro] :
       {std::pair(28, 2), {28, 4}, {30, 4}, {60, 4}, {40, 0}}) {
    config.batch = {.global = global, .micro = micro, .uneven = true};
    complete(config, 6);
    const RunConfig small = shrunk(config, 6);
    EXPECT_EQ(has_uneven_batch(small), has_uneven_batch(config)) << global;
    EXPECT_EQ(accumulation(small) % 2, accumulation(config) % 2) << global;
    EXPECT_LE(small.batch.global, global);
  }
}

// Layers with experts stay, and widths that experts' shards do not divide.
TEST(Verify, ShrinkKeepsExperts) {
  RunConfig config = small_run(1, 0);
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

// Each of mesh.cp and mesh.tp divides it, and both together do not.
TEST(Verify, ShrinkKeepsASequenceThatRanksDoNotDivide) {
  RunConfig config = small_run(1, 0);
  config.mesh.cp = 2;
  config.mesh.tp = 4;
  config.tensor.sequence_parallel = true;
  config.data.seq_len = config.model.max_seq = 2048;
  EXPECT_EQ(shrunk(config, 8).data.seq_len, 16);
  config.data.seq_len = 2044;
  EXPECT_THROW(shrunk(config, 8), Error);
}

// Sizes that do not divide by the mesh still do not.
TEST(Verify, ShrinkKeepsWhatDoesNotDivide) {
  RunConfig config = small_run(3, 3);
  config.model.vocab = 50257;
  config.model.hidden = 320;
  const RunConfig small = shrunk(config, 3);
  EXPECT_LT(small.model.vocab, 64);
  EXPECT_EQ(small.model.vocab % 3, 50257 % 3);
  EXPECT_LT(small.model.hidden, 32);
  EXPECT_EQ(small.model.hidden % 3, 320 % 3);
}

}  // namespace
}  // namespace tessera::verify
