#include "tessera/train/run_validation.h"

#include <chrono>

#include "tessera/core/log.h"
#include "tessera/engine/reader.h"

namespace tessera::train {

bool RunValidation::is_due(int64_t step, bool saves) const {
  if (samples_ == nullptr) return false;
  const int64_t every = config_.validate.every;
  return step == config_.run.steps || (every == 0 ? saves : step % every == 0);
}

monitor::Validation RunValidation::validate() {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  if (config_.validate.ema) model_.swap_averages();
  const MeanLoss mean = mean_loss(
      [this](const data::Batch& batch) { return model_.evaluate(batch); },
      batches(), *model_.composed().data, ranks_.world());
  if (config_.validate.ema) model_.swap_averages();
  const std::chrono::duration<double> taken = Clock::now() - start;
  return {.loss = mean.loss, .tokens = mean.tokens, .seconds = taken.count()};
}

monitor::Validation RunValidation::validate_after(int64_t step) {
  const monitor::Validation validation = validate();
  best_ = with_validation(best_, validation.loss, step);
  return validation;
}

Batches RunValidation::batches() {
  const int64_t most = config_.validate.samples;
  if (!engine::reads_for_others(config_)) {
    return validation_batches(*samples_, config_.batch.micro, most);
  }
  if (!share_) {
    share_ = std::make_unique<engine::BatchShare>(
        engine::group_of_reader(model_.mesh(), ranks_));
  }
  engine::BatchExtent extent =
      engine::extent_of_step(config_, config_.batch.micro);
  extent.microbatches = 1;
  return shared_batches(*samples_, extent, most, *share_);
}

bool RunValidation::is_out_of_patience() const {
  const int64_t patience = config_.validate.patience;
  if (patience == 0 || !best_ || best_->since < patience) return false;
  log::info("validate.patience: ", best_->since,
            " validations without a lower loss than ", best_->loss,
            " after step ", best_->step, ": the run ends");
  return true;
}

}  // namespace tessera::train
