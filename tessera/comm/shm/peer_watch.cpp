#include "tessera/comm/shm/peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/fd.h"

namespace tessera::comm::shm {
namespace {

bool is_short_of_descriptors(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM;
}

void check_descriptor(const Fd& fd) {
  TS_CHECK(fd.open(), "shm: cannot watch for the end of other ranks: ",
           std::strerror(errno),
           ". Raise the number of open files (ulimit -n).");
}

class PeerWatch {
 public:
  PeerWatch() : changed_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    check_descriptor(changed_);
    thread_ = std::jthread([this](const std::stop_token& stop) { loop(stop); });
  }
  ~PeerWatch() {
    thread_.request_stop();
    wake();
  }
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  int64_t add(pid_t pid, std::function<void()> on_end) {
    Fd pidfd(
        static_cast<int>(syscall(SYS_pidfd_open, static_cast<int>(pid), 0)));
    if (!pidfd.open()) {
      // Refused for other reasons (a kernel before 5.3, a sandbox) it goes on.
      if (is_short_of_descriptors(errno)) check_descriptor(pidfd);
      if (errno == ESRCH) on_end();
    }
    std::lock_guard lock(mutex_);
    const int64_t key = next_key_++;
    watched_.emplace(key, Entry{std::move(pidfd), std::move(on_end)});
    wake();
    return key;
  }

  // The lock is held while a callback runs: after this none does.
  void remove(int64_t key) {
    std::lock_guard lock(mutex_);
    watched_.erase(key);
  }

 private:
  struct Entry {
    Fd pidfd;
    std::function<void()> on_end;
  };

  void wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written =
        write(changed_.get(), &one, sizeof(one));
  }

  void loop(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      std::vector<int64_t> keys;
      std::vector<pollfd> ends{{changed_.get(), POLLIN, 0}};
      {
        std::lock_guard lock(mutex_);
        for (const auto& [key, entry] : watched_) {
          if (entry.pidfd.get() < 0) continue;
          keys.push_back(key);
          ends.push_back({entry.pidfd.get(), POLLIN, 0});
        }
      }
      if (poll(ends.data(), ends.size(), -1) <= 0) continue;
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t taken =
          read(changed_.get(), &count, sizeof(count));
      for (size_t i = 0; i < keys.size(); ++i) {
        if (ends[i + 1].revents != 0) tell(keys[i]);
      }
    }
  }

  void tell(int64_t key) {
    std::lock_guard lock(mutex_);
    const auto entry = watched_.find(key);
    if (entry == watched_.end()) return;
    // A number may have been given to another file since it was polled.
    pollfd end{entry->second.pidfd.get(), POLLIN, 0};
    if (poll(&end, 1, 0) <= 0) return;
    entry->second.on_end();
    watched_.erase(entry);
  }

  Fd changed_;
  std::mutex mutex_;
  std::map<int64_t, Entry> watched_;
  int64_t next_key_ = 0;
  std::jthread thread_;
};

// The thread lives while somebody is watched. A forked child has none of its
// parent's threads, and begins anew.
std::shared_ptr<PeerWatch> shared_watch() {
  static std::mutex mutex;
  static std::weak_ptr<PeerWatch> current;
  static pid_t owner = 0;
  std::lock_guard lock(mutex);
  auto watch = owner == getpid() ? current.lock() : nullptr;
  if (!watch) {
    watch = std::make_shared<PeerWatch>();
    current = watch;
    owner = getpid();
  }
  return watch;
}

class WatchedProcess : public Watched {
 public:
  WatchedProcess(pid_t pid, std::function<void()> on_end)
      : watch_(shared_watch()), key_(watch_->add(pid, std::move(on_end))) {}
  ~WatchedProcess() override { watch_->remove(key_); }
  WatchedProcess(const WatchedProcess&) = delete;
  WatchedProcess& operator=(const WatchedProcess&) = delete;

 private:
  const std::shared_ptr<PeerWatch> watch_;
  const int64_t key_;
};

}  // namespace

std::unique_ptr<Watched> watch_process(pid_t pid,
                                       std::function<void()> on_end) {
  return std::make_unique<WatchedProcess>(pid, std::move(on_end));
}

}  // namespace tessera::comm::shm
