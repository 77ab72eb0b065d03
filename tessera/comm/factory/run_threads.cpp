#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include "tessera/comm/communicator.h"
#include "tessera/comm/factory/failable_communicator.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// The first failure of any rank.
class FirstFailure {
 public:
  void set(std::exception_ptr failure) {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
  }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr failure_;
};

void run_rank(const CommunicatorOptions& options,
              const std::function<void(Communicator&)>& body,
              FirstFailure& failure) {
  RankContextGuard guard({.rank = static_cast<int>(options.rank),
                          .world_size = static_cast<int>(options.world_size),
                          .coords = {}});
  std::unique_ptr<FailableCommunicator> communicator;
  try {
    if (!options.devices.empty()) {
      take_device(options.devices.at(options.rank), options.rank);
    }
    communicator = make_failable_communicator(options);
    body(*communicator);
  } catch (const std::exception& error) {
    failure.set(std::current_exception());
    if (communicator) communicator->fail(message_of(error));
  }
}

// Intra-op threads of each rank, while ranks share this process.
class SharedCores {
 public:
  explicit SharedCores(int64_t ranks)
      : before_(at::get_num_threads()),
        share_(static_cast<int>(
            std::max<int64_t>(1, before_ / std::max<int64_t>(1, ranks)))) {}
  ~SharedCores() { at::set_num_threads(before_); }
  SharedCores(const SharedCores&) = delete;
  SharedCores& operator=(const SharedCores&) = delete;
  // Each thread has a count of its own.
  void take_share() const { at::set_num_threads(share_); }

 private:
  const int before_;
  const int share_;
};

}  // namespace

void run_threads(int64_t world_size, const std::string& backend,
                 const std::function<void(Communicator&)>& body,
                 std::chrono::milliseconds timeout) {
  run_threads({.backend = backend,
               .world_size = world_size,
               .local_world_size = world_size,
               .timeout = timeout},
              body);
}

void run_threads(CommunicatorOptions options,
                 const std::function<void(Communicator&)>& body) {
  options.store = c10::make_intrusive<c10d::HashStore>();
  FirstFailure failure;
  {
    const SharedCores cores(options.world_size);
    std::vector<std::jthread> ranks;
    for (int64_t rank = 0; rank < options.world_size; ++rank) {
      options.rank = rank;
      ranks.emplace_back([&, options] {
        cores.take_share();
        run_rank(options, body, failure);
      });
    }
  }
  failure.rethrow();
}

}  // namespace tessera::comm
