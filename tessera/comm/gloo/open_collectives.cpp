#include "tessera/comm/gloo/open_collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace tessera::comm::gloo {
namespace {

std::exception_ptr error_of(const std::string& why) {
  try {
    C10_THROW_ERROR(DistBackendError, why);
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

std::exception_ptr error_in(const std::function<void()>& then) {
  try {
    at::AutoDispatchBelowAutograd guard;
    if (then) then();
    return nullptr;
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

}  // namespace

c10::intrusive_ptr<PendingWork> OpenCollectives::track(
    const c10::intrusive_ptr<c10d::Work>& collective, int rank,
    c10d::OpType type, std::vector<at::Tensor> tensors,
    std::function<void()> then) {
  auto work = c10::make_intrusive<PendingWork>(rank, type, std::move(tensors));
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    ++num_unended_;
    failure = failure_;
    if (!failure) open_.emplace(work.get(), work);
  }
  if (failure) work->complete(failure);
  collective->getFuture()->addCallback(
      [self = shared_from_this(), work,
       then = std::move(then)](c10::ivalue::Future& future) {
        const auto taken = self->take(*work);
        if (!taken) return;
        taken->complete(future.hasError() ? future.exception_ptr()
                                          : error_in(then));
      });
  return work;
}

void OpenCollectives::fail(const std::string& why) {
  decltype(open_) open;
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = error_of(why);
    failure = failure_;
    open = std::exchange(open_, {});
  }
  for (const auto& each : open) each.second->complete(failure);
  ended_.notify_all();
}

void OpenCollectives::wait() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return open_.empty(); });
}

bool OpenCollectives::is_held_up() const {
  const std::lock_guard lock(mutex_);
  return failure_ && num_unended_ > 0;
}

c10::intrusive_ptr<PendingWork> OpenCollectives::take(const PendingWork& work) {
  const std::lock_guard lock(mutex_);
  --num_unended_;
  ended_.notify_all();
  const auto found = open_.extract(&work);
  return found ? found.mapped() : c10::intrusive_ptr<PendingWork>();
}

}  // namespace tessera::comm::gloo
