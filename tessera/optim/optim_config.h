// The sections optimizer and schedule of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::optim {

// Parameters that are updated otherwise than the rest.
struct ParameterGroup {
  std::vector<std::string> match;  // globs over names of parameters
  double lr = -1;                  // -1: the optimizer's, and so below
  double weight_decay = -1;        // of all of them, whatever their dimensions
  std::vector<double> betas = {};
  void declare(config::Section& section);
};

// What Muon does to hidden matrices; all else is AdamW's.
struct MuonConfig {
  double momentum = 0.95;
  bool nesterov = true;
  int64_t steps = 5;
  double eps = 1e-7;
  std::string adjust_lr = "original";
  std::string dtype = "auto";  // auto: precision.compute, of fp16 bf16
  double adamw_lr = 0;         // 0: optimizer.lr
  void declare(config::Section& section);
};

struct OptimizerConfig {
  std::string type = "adamw";
  double lr = 3e-4;
  std::vector<double> betas = {};  // empty: the optimizer's own
  double eps = 1e-8;
  double momentum = 0.0;
  double weight_decay = 0.1;
  double clip_norm = 1.0;
  bool normalize_grad = false;
  bool skip_nonfinite = false;
  std::string state_dtype = "auto";  // auto: that of the masters
  double ema = 0;                    // 0: no average is kept
  MuonConfig muon;
  std::vector<ParameterGroup> groups;
  void declare(config::Section& section);
  bool scales_gradients() const { return normalize_grad || clip_norm > 0; }
  // Puts the optimizer's own values where they were left open.
  void complete();
};

struct ScheduleConfig {
  std::string type = "cosine";
  int64_t warmup = 0;
  std::string warmup_type = "linear";
  double start_lr = 0.0;
  double min_lr = 0.0;
  int64_t steps = 0;   // 0: those of the run
  double decay = 0.2;  // of wsd: the share of steps in which it falls
  std::string convention = "tessera";
  void declare(config::Section& section);
};

}  // namespace tessera::optim
