// The sections zero, tensor, context, pipeline, precision and recompute of the
// configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::parallel {

struct ZeroConfig {
  int64_t stage = 0;
  int64_t expert_stage = -1;  // -1: as stage
  bool reshard_after_forward = true;
  double bucket_mb = 25.0;
  int64_t prefetch = -1;  // -1: 1, over shared memory alone 0
  std::string offload = "none";
  void declare(config::Section& section);
};

struct TensorConfig {
  bool sequence_parallel = false;
  void declare(config::Section& section);
};

struct ContextConfig {
  std::string method = "ring";
  void declare(config::Section& section);
};

struct PipelineConfig {
  std::string schedule = "1f1b";
  int64_t chunks = 1;
  std::vector<int64_t> split = {};  // layers of each stage; empty: even
  void declare(config::Section& section);
};

struct PrecisionConfig {
  std::string compute = "fp32";
  std::string reduce = "auto";  // auto: fp32, or fp64 where that computes
  double loss_scale = 1.0;      // 0: found while training
  void declare(config::Section& section);
};

struct RecomputeConfig {
  std::string mode = "none";
  int64_t every = 1;
  void declare(config::Section& section);
};

}  // namespace tessera::parallel
