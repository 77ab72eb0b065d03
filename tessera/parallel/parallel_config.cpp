#include "tessera/parallel/parallel_config.h"

#include "tessera/program/schedules/schedule.h"

namespace tessera::parallel {

void ZeroConfig::declare(config::Section& section) {
  section
      .key("stage", stage,
           "what the ranks of dp_shard share out: 0 nothing, 1 the optimizer, "
           "2 gradients too, 3 parameters too")
      .at_least(0)
      .at_most(3);
  section.key("expert_stage", expert_stage, "of experts; -1: as stage")
      .at_least(-1)
      .at_most(3);
  section.key("reshard_after_forward", reshard_after_forward,
              "stage 3: free the gathered parameters between forward and "
              "backward");
  section
      .key("bucket_mb", bucket_mb,
           "MiB of gradients that are reduced in one operation")
      .more_than(0)
      .at_most(1 << 20);
  section
      .key("prefetch", prefetch,
           "layers whose parameters are gathered ahead; -1: 1, but 0 "
           "where all ranks share memory, whose cores do both")
      .at_least(-1)
      .at_most(1 << 20);
  section.key("offload", offload, "what lives in host memory")
      .one_of({"none", "optimizer", "all"})
      .not_built({"optimizer", "all"}, "offloading", "none");
}

void TensorConfig::declare(config::Section& section) {
  section.key("sequence_parallel", sequence_parallel,
              "cut norms and residuals along the sequence over tp");
}

void ContextConfig::declare(config::Section& section) {
  section.key("method", method, "how attention sees a sequence that is cut")
      .one_of({"ring", "ulysses", "allgather"});
}

void PipelineConfig::declare(config::Section& section) {
  const std::vector<std::string> not_built = {"zb_h1", "zb_v", "dualpipe"};
  auto choices = program::schedules::names();
  choices.insert(choices.end(), not_built.begin(), not_built.end());
  section.key("schedule", schedule, "order of forwards and backwards")
      .one_of(choices)
      .not_built(not_built, "this schedule", "1f1b");
  section.key("chunks", chunks, "stages that a rank holds")
      .at_least(1)
      .at_most(1 << 20);
  section.key("split", split, "layers of each stage; none: evenly");
}

void PrecisionConfig::declare(config::Section& section) {
  section.key("compute", compute, "type of parameters and activations")
      .one_of({"fp64", "fp32", "bf16", "fp16"})
      .not_built({"fp16"}, "training in fp16", "bf16 or fp32");
  section
      .key("reduce", reduce,
           "type in which gradients are accumulated and summed over ranks; "
           "auto: fp32, or fp64 with precision.compute fp64")
      .one_of({"auto", "fp64", "fp32", "bf16", "fp16"})
      .not_built({"fp64", "fp16"}, "reducing in this type", "auto");
  section
      .key("loss_scale", loss_scale,
           "factor of the loss in fp16; 0: found while training")
      .at_least(0)
      .not_built("loss scaling");
}

void RecomputeConfig::declare(config::Section& section) {
  section.key("mode", mode, "activations that backward computes again")
      .one_of({"none", "selective", "block", "stage", "minimal"})
      .not_built({"selective", "stage", "minimal"}, "this mode", "block");
  section.key("every", every, "every n-th block is recomputed")
      .at_least(1)
      .at_most(1 << 24);
}

}  // namespace tessera::parallel
