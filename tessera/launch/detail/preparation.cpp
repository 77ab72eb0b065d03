#include "tessera/launch/detail/preparation.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <future>
#include <mutex>
#include <string>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/launch/detail/deadline.h"
#include "tessera/launch/detail/roll_call.h"
#include "tessera/launch/store.h"

namespace tessera::launch::detail {
namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kLook{100};
constexpr int64_t kLooksForABeat = 5;
constexpr Milliseconds kBeat{1000};
// For a store that may have been cut off.
constexpr Milliseconds kStorePatience{1000};
constexpr const char* kBeats = "beats";
constexpr const char* kReady = "ready";

std::string preparing_key(int64_t rank) {
  return "preparing/" + std::to_string(rank);
}

// "rank 3 (node1, process 55)"
std::string names_of_silent(const RankEnvironment& here, c10d::Store& store) {
  std::string names;
  for (int64_t rank = 0; rank < here.world_size; ++rank) {
    if (!store.check({preparing_key(rank)})) continue;
    names += c10::str(names.empty() ? "" : ", ", "rank ", rank, " (",
                      whereabouts_of(rank, store), ")");
  }
  return names;
}

std::string silence(const RankEnvironment& here, const StorePtr& store) {
  std::string names;
  try {
    names = within(kStorePatience, "",
                   [=] { return names_of_silent(here, *store); });
  } catch (const std::exception&) {
    names = "the rendezvous";
  }
  if (names.empty()) names = "another rank";
  return c10::str("launch: rank ", here.rank, " waits for the data, but ",
                  names, " was not heard of for ",
                  in_seconds(here.join_timeout),
                  " s. Is it stopped, or its host cut off?");
}

}  // namespace

struct Heartbeat::State {
  void loop(const RankEnvironment& here, c10d::Store& store);

  std::mutex mutex;
  std::condition_variable changed;
  bool closing = false;
  bool ended = false;  // the loop
  std::exception_ptr refusal;
};

void Heartbeat::State::loop(const RankEnvironment& here, c10d::Store& store) {
  const QuietC10d quiet;
  const Milliseconds pause = std::min(kBeat, here.join_timeout / 4);
  std::unique_lock lock(mutex);
  try {
    while (!changed.wait_for(lock, pause, [&] { return closing; })) {
      lock.unlock();
      store.add(kBeats, 1);
      check_no_refusal(here, store);
      lock.lock();
    }
  } catch (const PeerRefused&) {
    lock.lock();
    refusal = std::current_exception();
  } catch (const std::exception&) {  // the wait that follows says so
    lock.lock();
  }
  ended = true;
  changed.notify_all();
}

Heartbeat::Heartbeat(const RankEnvironment& here, StorePtr store)
    : state_(std::make_shared<State>()) {
  store->set(preparing_key(here.rank), "1");
  thread_ = std::thread([state = state_, here, store = std::move(store)] {
    state->loop(here, *store);
  });
}

Heartbeat::~Heartbeat() {
  bool ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->closing = true;
    state_->changed.notify_all();
    ended = state_->changed.wait_for(lock, kStorePatience,
                                     [&] { return state_->ended; });
  }
  ended ? thread_.join() : thread_.detach();
}

void Heartbeat::check() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->refusal) std::rethrow_exception(state_->refusal);
}

void say_ready(const RankEnvironment& here, c10d::Store& store) {
  if (here.local_rank == 0) store.deleteKey(preparing_key(here.rank));
  if (store.add(kReady, 1) == here.world_size) store.set(kDecided, "1");
}

void await_decision(const RankEnvironment& here, const StorePtr& store) {
  struct Watch {
    std::atomic<int64_t> news = 0;
    std::atomic<bool> is_given_up = false;
  };
  const auto watch = std::make_shared<Watch>();
  std::packaged_task<void()> task(
      [watch, here, store, context = rank_context()] {
        const RankContextGuard guard(context);
        const QuietC10d quiet;
        int64_t beats = -1;
        for (int64_t look = 0; !store->check({kDecided}); ++look) {
          if (watch->is_given_up) return;
          if (look % kLooksForABeat == 0) {
            const int64_t now = store->add(kBeats, 0);
            if (now != std::exchange(beats, now)) ++watch->news;
          }
          std::this_thread::sleep_for(kLook);
        }
        check_no_refusal(here, *store);
      });
  std::future<void> decided = task.get_future();
  std::thread(std::move(task)).detach();
  // Looks, not seconds: a job that is stopped as a whole goes on afterwards.
  const int64_t most = std::max<int64_t>(1, here.join_timeout / kLook);
  int64_t seen = 0;
  for (int64_t in_vain = 0;
       decided.wait_for(kLook) != std::future_status::ready;) {
    const int64_t news = watch->news;
    in_vain = news == std::exchange(seen, news) ? in_vain + 1 : 0;
    if (in_vain <= most) continue;
    watch->is_given_up = true;
    TS_CHECK_REACH(false, silence(here, store));
  }
  decided.get();
}

}  // namespace tessera::launch::detail
