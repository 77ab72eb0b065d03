// The section zero of the configuration.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/config.h"

namespace tessera::parallel::data {

struct ZeroConfig {
  int64_t stage = 0;
  int64_t expert_stage = -1;  // -1: as stage
  std::string expert_shard = "all";
  bool reshard_after_forward = true;
  double bucket_mb = 25.0;
  int64_t prefetch = -1;  // -1: 1, over shared memory alone 0
  std::string offload = "none";
  std::string offload_folder = "";
  void declare(config::Section& section);

  int64_t stage_of_experts() const {
    return expert_stage < 0 ? stage : expert_stage;
  }
  // Experts are sharded inside a replica alone, where they are.
  bool shards_experts_by_replica() const {
    return expert_shard == "dp_shard" && stage_of_experts() > 0;
  }
  // States of the optimizer lie in files; parameters do, too.
  bool offloads() const { return offload != "none"; }
  bool offloads_parameters() const { return offload == "all"; }
  // With what -1 stands for in its place.
  ZeroConfig resolved(bool ranks_share_memory) const;
  // Of an all_reduce, at most.
  int64_t bucket_bytes() const;
};

}  // namespace tessera::parallel::data
