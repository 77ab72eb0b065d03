// The validations that a run does as it goes on, and what follows from the
// lowest loss: which checkpoint stays, and when the run ends.
//
// Comm: validate() is collective over all ranks; the rest is alike on each.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "tessera/comm/communicator.h"
#include "tessera/data/dataset.h"
#include "tessera/engine/batch_share.h"
#include "tessera/engine/rank_model.h"
#include "tessera/engine/run_config.h"
#include "tessera/monitor/step_record.h"
#include "tessera/train/best_loss.h"
#include "tessera/train/evaluate.h"

namespace tessera::train {

class RunValidation {
 public:
  // `samples`: nullptr: there are none, and nothing is ever due.
  RunValidation(const engine::RunConfig& config, comm::Communicator& ranks,
                engine::RankModel& model, const data::Dataset* samples)
      : config_(config), ranks_(ranks), model_(model), samples_(samples) {}

  bool is_due_at_start() const {
    return samples_ != nullptr && config_.validate.at_start;
  }
  // `saves`: a checkpoint is due behind it.
  bool is_due(int64_t step, bool saves) const;

  monitor::Validation validate();
  // The same, whose loss counts.
  monitor::Validation validate_after(int64_t step);

  // None: not validated so far.
  const std::optional<BestLoss>& best() const { return best_; }
  // As a checkpoint knows it that the run goes on from.
  void go_on(const std::optional<BestLoss>& best) { best_ = best; }
  // The step's loss is the lowest, and its checkpoint is wanted.
  bool is_best(int64_t step) const {
    return config_.checkpoint.keep_best && best_ && best_->step == step;
  }
  bool is_out_of_patience() const;

 private:
  Batches batches();

  const engine::RunConfig& config_;
  comm::Communicator& ranks_;
  engine::RankModel& model_;
  const data::Dataset* samples_;
  std::unique_ptr<engine::BatchShare>
      share_;  // where one rank reads for others
  std::optional<BestLoss> best_;
};

}  // namespace tessera::train
