#include "tessera/parallel/data/zero_config.h"

#include <algorithm>

namespace tessera::parallel::data {

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
  section
      .key("expert_shard", expert_shard,
           "which ranks share out an expert: all that hold it; dp_shard: of "
           "these the ones inside a replica of dp_replicate")
      .one_of({"all", "dp_shard"});
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
  section
      .key("offload", offload,
           "what lies in files between its uses: the optimizer's states; all: "
           "weights too, on GPUs with stage 3 alone")
      .one_of({"none", "optimizer", "all"});
  section.key("offload_folder", offload_folder,
              "of these files, one a rank; empty: the run's folder");
}

// Over shared memory a gather is work of the same cores: nothing is hidden.
ZeroConfig ZeroConfig::resolved(bool ranks_share_memory) const {
  ZeroConfig config = *this;
  config.expert_stage = stage_of_experts();
  if (prefetch < 0) config.prefetch = ranks_share_memory ? 0 : 1;
  return config;
}

int64_t ZeroConfig::bucket_bytes() const {
  return std::max<int64_t>(1, static_cast<int64_t>(bucket_mb * (1 << 20)));
}

}  // namespace tessera::parallel::data
