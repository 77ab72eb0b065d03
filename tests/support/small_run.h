// A small training run, and layouts of experts on four devices, with what is
// true of each.
#pragma once

#include "tessera/engine/run_config.h"

namespace tessera::testing {

inline engine::RunConfig small_run(int64_t ranks, int64_t zero_stage) {
  engine::RunConfig config;
  config.run.device = "cpu";
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

struct ExpertLayout {
  int64_t experts, dp, tp, ep, zero_stage, expert_stage;
  const char* groups;        // which ranks are in which
  double trunk, of_experts;  // bytes on a device of each of its parameters
  // Of dp; each has all experts, and shards them by itself.
  int64_t replicas = 1;
};

inline constexpr ExpertLayout kExpertLayouts[] = {
    {8, 4, 1, 2, 0, -1,
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
     16, 4},
    {4, 4, 1, 1, 3, -1,
     "groups      dp_replicate {0,2} {1,3}\n"
     "            dp_shard {0,1} {2,3}\n"
     "            expert_replicate {0,2} {1,3}\n"
     "            expert_dp {0,1} {2,3}\n",
     8, 8, 2},
    {4, 4, 1, 2, 3, -1,
     "groups      dp_replicate {0,2} {1,3}\n"
     "            dp_shard {0,1} {2,3}\n"
     "            expert_replicate {0,2} {1,3}\n"
     "            ep {0,1} {2,3}\n"
     "            experts 0-1 on ranks 0, 2\n"
     "            experts 2-3 on ranks 1, 3\n",
     8, 8, 2}};

inline engine::RunConfig run_of_experts(const ExpertLayout& layout) {
  engine::RunConfig config = small_run(1, 0);
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
  if (layout.replicas > 1) {
    config.mesh.dp_replicate = layout.replicas;
    config.zero.expert_shard = "dp_shard";
  }
  complete(config, 4);
  return config;
}

}  // namespace tessera::testing
