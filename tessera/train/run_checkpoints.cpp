#include "tessera/train/run_checkpoints.h"

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::train {

void RunCheckpoints::save_due(int64_t step, const TakeContent& take) {
  if (newest_ == step) return;
  finish();
  try_to(step, [&] {
    leave_other_lines();
    const Content content = take();
    if (in_background_) {
      under_way_ = std::make_unique<checkpoint::BackgroundSave>(
          folder_, step, content.state, world_, content.options);
    } else {
      checkpoint::save(folder_, step, content.state, world_, content.options);
      note_saved(step);
    }
    newest_ = step;
  });
}

void RunCheckpoints::save_local(int64_t step, const TakeContent& take) {
  const auto save = [&] {
    const Content content = take();
    local_->save(step, content.state, content.options.mesh);
  };
  constexpr int64_t kToldEvery = 100;
  const bool is_news = local_failures_ % kToldEvery == 0;
  if (!try_to(step, save, is_news)) {
    ++local_failures_;
    return;
  }
  has_saved_ = true;
  if (std::exchange(local_failures_, 0) > 0) {
    log::info("checkpoint of step ", step, " is in checkpoint.local_dir again");
  }
}

void RunCheckpoints::save_last(int64_t step, const TakeContent& take) {
  finish();
  if (newest_ == step) return;
  leave_other_lines();
  const Content content = take();
  checkpoint::save(folder_, step, content.state, world_, content.options);
  note_saved(step);
  newest_ = step;
}

void RunCheckpoints::finish() {
  if (!under_way_) return;
  const auto saved = std::move(under_way_);
  try_to(saved->step(), [&] {
    saved->finish();
    note_saved(saved->step());
  });
}

std::optional<int64_t> RunCheckpoints::take_failed() {
  return std::exchange(failed_, std::nullopt);
}

bool RunCheckpoints::try_to(int64_t step, const std::function<void()>& work,
                            bool is_news) {
  try {
    work();
    return true;
  } catch (const Error& error) {
    if (error.exit_code() != ExitCode::kInputOutput) throw;
    if (newest_ == step) newest_ = -1;
    failed_ = step;
    if (world_.rank() == 0 && is_news) {
      log::warning(message_of(error),
                   " The run goes on; its next checkpoint is tried when it is "
                   "due.");
    }
    return false;
  }
}

void RunCheckpoints::leave_other_lines() {
  if (local_) return local_->leave_other_lines();
  std::string left;
  comm::on_first(world_, "looking into " + folder_,
                 [&] { left = checkpoint::forget_local_checkpoints(folder_); });
  if (left.empty()) return;
  log::warning("checkpoint.local_every is 0: ", left,
               " on each host is not used any more. To remove it gives its "
               "memory back.");
}

void RunCheckpoints::note_saved(int64_t step) {
  has_saved_ = true;
  if (local_) local_->base_changed();
  log::info("checkpoint of step ", step, " is in ", folder_);
}

}  // namespace tessera::train
