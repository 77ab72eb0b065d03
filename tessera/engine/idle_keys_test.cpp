#include "tessera/engine/idle_keys.h"

#include <gtest/gtest.h>

namespace tessera::engine {
namespace {

TEST(IdleKeys, AreTold) {
  const auto idle = [](const std::string& text) {
    config::Provenance origins;
    const auto config = run_config_from_text(text, "f", {}, &origins);
    return without_effect(config, origins);
  };
  EXPECT_EQ(idle("{}").size(), 0);
  EXPECT_EQ(idle(R"({"optimizer": {"momentum": 0.5}})"),
            std::vector<std::string>{
                "optimizer.momentum is not used by optimizer.type adamw"});
  EXPECT_EQ(idle(R"({"optimizer": {"type": "sgd", "eps": 1e-6},
                     "schedule": {"type": "constant", "min_lr": 1e-5},
                     "recompute": {"mode": "minimal", "every": 2},
                     "model": {"family": "gpt2", "rope_theta": 5.0}})")
                .size(),
            4);
  EXPECT_EQ(idle(R"({"optimizer": {"normalize_grad": true, "clip_norm": 2}})"),
            std::vector<std::string>{
                "optimizer.clip_norm has nothing to do: "
                "optimizer.normalize_grad gives every gradient the norm 1"});
  EXPECT_EQ(idle(R"({"optimizer": {"type": "sgd", "groups": [
                      {"match": "*.bias", "weight_decay": 0},
                      {"match": "*", "betas": [0.5, 0.9]}]}})"),
            std::vector<std::string>{"optimizer.groups[1].betas is not used by "
                                     "optimizer.type sgd"});
  EXPECT_EQ(
      idle(R"({"model": {"vocab": 64}, "optimizer": {"type": "muon", "groups": [
                      {"match": "embed.*", "betas": [0.5, 0.9]},
                      {"match": "blocks.*.q.weight", "betas": [0.5, 0.9]}]}})"),
      std::vector<std::string>{"optimizer.groups[1].betas is not used by "
                               "optimizer.type muon: the group has "
                               "hidden matrices alone"});
  EXPECT_EQ(idle(R"({"pipeline": {"order": "forward"}})"),
            std::vector<std::string>{
                "pipeline.order is not used by pipeline.schedule 1f1b"});
  EXPECT_TRUE(idle(R"({"pipeline": {"schedule": "gpipe", "order": "forward"}})")
                  .empty());
  const std::string sharded =
      R"({"zero": {"expert_shard": "dp_shard", "stage": 1)";
  EXPECT_EQ(idle(sharded + "}}"),
            std::vector<std::string>{
                "zero.expert_shard is not used by a model without experts"});
  const std::string experts = R"(}, "model": {"moe": {"experts": 4}})";
  EXPECT_EQ(idle(sharded + R"(, "expert_stage": 0)" + experts + "}"),
            std::vector<std::string>{
                "zero.expert_shard is not used while zero.expert_stage is 0: "
                "experts are not sharded"});
  EXPECT_EQ(idle(sharded + experts + R"(, "mesh": {"dp_replicate": 1}})"),
            std::vector<std::string>{
                "zero.expert_shard changes nothing where mesh.dp_replicate is "
                "1: there is one replica"});
  EXPECT_TRUE(
      idle(sharded + experts + R"(, "mesh": {"dp_replicate": 2}})").empty());
  EXPECT_EQ(idle(R"({"recompute": {"mode": "stage", "every": 99}})"),
            std::vector<std::string>{"recompute.every is no less than a stage "
                                     "has blocks, as 0 is"});
  // The file that a run wrote has every key, and asks for nothing.
  EXPECT_TRUE(idle(to_json(RunConfig())).empty());
}

}  // namespace
}  // namespace tessera::engine
