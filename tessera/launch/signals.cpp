#include "tessera/launch/signals.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/fd.h"
#include "tessera/launch/detail/signal_queue.h"

namespace tessera::launch {
namespace {

constexpr int kSignals[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};

// What the handler touches: lock-free, and never destroyed.
std::atomic<bool> installed{false};
std::atomic<int> first_signal{0};
std::atomic<int64_t> first_at_ns{0};
static_assert(std::atomic<int>::is_always_lock_free &&
              std::atomic<int64_t>::is_always_lock_free);

int64_t now_ns() {  // clock_gettime is async-signal-safe
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void on_signal(int signal) {
  constexpr int64_t merge_ns =
      std::chrono::nanoseconds(StopRequest::kMerge).count();
  const int saved_errno = errno;
  int none = 0;
  const int64_t now = now_ns();
  if (first_signal.compare_exchange_strong(none, signal)) {
    first_at_ns = now;
  } else if (first_at_ns != 0 && now - first_at_ns > merge_ns) {
    _exit(128 + signal);
  }
  errno = saved_errno;
}

}  // namespace

StopRequest::StopRequest() {
  TORCH_INTERNAL_ASSERT(!installed.exchange(true), "one StopRequest a process");
  first_signal = 0;
  first_at_ns = 0;
  for (int signal : kSignals) {
    struct sigaction action{};
    action.sa_handler = on_signal;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    struct sigaction& before = before_.emplace_back();
    sigaction(signal, nullptr, &before);
    const bool nohup = signal == SIGHUP && before.sa_handler == SIG_IGN;
    if (!nohup) sigaction(signal, &action, nullptr);
  }
}

StopRequest::~StopRequest() {
  for (size_t i = 0; i < before_.size(); ++i) {
    sigaction(kSignals[i], &before_[i], nullptr);
  }
  installed = false;
}

int StopRequest::signal() const { return first_signal; }

struct TidyUp::Impl {
  detail::SignalQueue signals = {};
  Fd end{eventfd(0, EFD_CLOEXEC)};
  std::jthread thread = {};

  void wait(const std::function<void()>& tidy) const {
    pollfd events[] = {{.fd = signals.fd(), .events = POLLIN, .revents = 0},
                       {.fd = end.get(), .events = POLLIN, .revents = 0}};
    while (true) {
      if (poll(events, 2, -1) < 0) continue;  // a signal, to be read next
      if (events[1].revents != 0) return;
      const int signal = signals.next();
      if (signal == 0) continue;
      tidy();
      std::signal(signal, SIG_DFL);
      kill(getpid(), signal);
      _exit(128 + signal);  // the first process of a container is not killed
    }
  }
};

TidyUp::TidyUp(std::function<void()> tidy) : impl_(std::make_unique<Impl>()) {
  TS_CHECK(impl_->end.open(),
           "launch: no event for the end of a thread: ", std::strerror(errno),
           ".");
  impl_->thread = std::jthread(
      [impl = impl_.get(), tidy = std::move(tidy)] { impl->wait(tidy); });
}

TidyUp::~TidyUp() {
  eventfd_write(impl_->end.get(), 1);
  impl_->thread.join();
  const int late = impl_->signals.next();
  impl_.reset();
  if (late != 0) kill(getpid(), late);
}

}  // namespace tessera::launch
