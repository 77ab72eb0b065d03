// Of a step's nn::Balance, summed over all ranks: what its record tells of
// experts, and a warning where one starves.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "tessera/models/model_config.h"
#include "tessera/monitor/step_record.h"

namespace tessera::train {

// Which experts starve: over `kSteps` steps less than `kShare` of their even
// share of rows.
class ExpertWatch {
 public:
  static constexpr int64_t kSteps = 100;
  static constexpr double kShare = 0.05;

  // Of steps of so many tokens.
  ExpertWatch(const models::ModelConfig& model, int64_t tokens)
      : model_(model), tokens_(tokens) {}
  // counts: (layers with experts, E + 2). Fills in the record's part.
  void add(const at::Tensor& counts, monitor::StepRecord& record);
  // Of the steps behind the last warning, once in `kSteps`, and once in a run;
  // empty: none. Names layer, expert and what to change.
  std::string warning();

 private:
  const models::ModelConfig model_;
  const int64_t tokens_;
  at::Tensor rows_;  // (layers, E), since the last look
  int64_t steps_ = 0;
  bool has_warned_ = false;
};

}  // namespace tessera::train
