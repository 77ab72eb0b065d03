#include "tessera/train/run_checkpoints.h"

#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::train {

void RunCheckpoints::save_due(int64_t step, const TakeContent& take) {
  if (newest_ == step) return;
  finish();
  try_to(step, [&] {
    const Content content = take();
    if (in_background_) {
      under_way_ = std::make_unique<checkpoint::BackgroundSave>(
          folder_, step, content.state, world_, content.options);
    } else {
      checkpoint::save(folder_, step, content.state, world_, content.options);
      tell(step);
    }
    newest_ = step;
  });
}

void RunCheckpoints::save_last(int64_t step, const TakeContent& take) {
  finish();
  if (newest_ == step) return;
  const Content content = take();
  checkpoint::save(folder_, step, content.state, world_, content.options);
  tell(step);
  newest_ = step;
}

void RunCheckpoints::finish() {
  if (!under_way_) return;
  const auto saved = std::move(under_way_);
  try_to(saved->step(), [&] {
    saved->finish();
    tell(saved->step());
  });
}

std::optional<int64_t> RunCheckpoints::take_failed() {
  return std::exchange(failed_, std::nullopt);
}

void RunCheckpoints::try_to(int64_t step, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.exit_code() != ExitCode::kInputOutput) throw;
    if (newest_ == step) newest_ = -1;
    failed_ = step;
    if (world_.rank() != 0) return;
    log::warning(message_of(error),
                 " The run goes on; its next checkpoint is tried when it is "
                 "due.");
  }
}

void RunCheckpoints::tell(int64_t step) const {
  log::info("checkpoint of step ", step, " is in ", folder_);
}

}  // namespace tessera::train
