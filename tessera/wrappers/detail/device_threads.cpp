#include "tessera/wrappers/detail/device_threads.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/vector_math.h"

namespace tessera::wrappers {
namespace {

// What a worker takes over from the thread that called run().
struct Job {
  const std::function<void(size_t)>* work = nullptr;
  size_t active = 0;
  at::ThreadLocalState state;
  RankContext rank;
};

[[noreturn]] void rethrow_naming(const std::exception_ptr& failure,
                                 size_t device,
                                 const std::vector<c10::Device>& devices) {
  const std::string where =
      c10::str("data_parallel: on device ", device, " of ", devices.size(),
               " (", devices[device], ")");
  try {
    std::rethrow_exception(failure);
  } catch (c10::Error& error) {
    error.add_context(where);  // keeps the type, and the exit code with it
    throw;
  } catch (const std::exception& error) {
    TS_CHECK(false, where, ": ", error.what());
  }
  TORCH_INTERNAL_ASSERT(false, "a worker threw what is no exception");
}

}  // namespace

struct DeviceThreads::Impl {
  std::vector<c10::Device> devices;
  std::vector<std::exception_ptr> failures;
  std::vector<std::thread> threads;

  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  Job job;             // guarded by mutex while it is replaced
  int64_t number = 0;  // of jobs given out
  size_t pending = 0;  // workers that have not ended the job
  bool stop = false;

  void execute(size_t device) {
    try {
      const at::ThreadLocalStateGuard state(job.state);
      const RankContextGuard rank(job.rank);
      const c10::OptionalDeviceGuard guard(devices[device]);
      (*job.work)(device);
    } catch (...) {
      failures[device] = std::current_exception();
    }
  }

  void serve(size_t device) {
    for (int64_t served = 0;; ++served) {
      std::unique_lock lock(mutex);
      wake.wait(lock, [&] { return stop || number > served; });
      if (stop) return;
      lock.unlock();
      if (device < job.active) execute(device);
      lock.lock();
      if (--pending == 0) done.notify_one();
    }
  }

  // The engine's thread of a GPU waits in an outer backward for device 0's
  // inner one; that must run in the same thread, or it would wait for itself.
  bool first_runs_inline() const { return !devices[0].is_cpu(); }
};

DeviceThreads::DeviceThreads(std::vector<c10::Device> devices)
    : impl_(std::make_unique<Impl>()) {
  settle_vector_math();
  impl_->devices = std::move(devices);
  const size_t size = impl_->devices.size();
  impl_->failures.resize(size);
  for (size_t device = impl_->first_runs_inline() ? 1 : 0; device < size;
       ++device) {
    impl_->threads.emplace_back([this, device] { impl_->serve(device); });
  }
  const int all = at::get_num_threads();
  const int share = std::max(1, all / static_cast<int>(size));
  std::mutex one_at_a_time;
  const size_t first = impl_->first_runs_inline() ? 1 : 0;
  run(size, [&](size_t device) {
    if (device < first) return;
    const std::lock_guard lock(one_at_a_time);
    at::get_num_threads();  // a thread's first use takes the global count over
    at::set_num_threads(share);
  });
  at::set_num_threads(all);  // new threads elsewhere start with this again
}

DeviceThreads::~DeviceThreads() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
}

void DeviceThreads::run(size_t active,
                        const std::function<void(size_t)>& work) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->job = {&work, active, at::ThreadLocalState(), rank_context()};
    impl_->pending = impl_->threads.size();
    ++impl_->number;
  }
  impl_->wake.notify_all();
  if (impl_->first_runs_inline()) impl_->execute(0);
  std::unique_lock lock(impl_->mutex);
  impl_->done.wait(lock, [&] { return impl_->pending == 0; });
  auto failures = std::exchange(
      impl_->failures, std::vector<std::exception_ptr>(impl_->devices.size()));
  for (size_t device = 0; device < failures.size(); ++device) {
    if (failures[device]) {
      rethrow_naming(failures[device], device, impl_->devices);
    }
  }
}

}  // namespace tessera::wrappers
