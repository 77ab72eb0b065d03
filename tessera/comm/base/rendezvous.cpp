#include "tessera/comm/base/rendezvous.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/base/in_time.h"
#include "tessera/comm/base/patient_store.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::comm {
namespace {

constexpr const char* kFailureKey = "failure";
// How soon a waiting rank looks again, and whether another one failed.
constexpr auto kSlice = std::chrono::milliseconds(20);
constexpr auto kAnnouncePatience = std::chrono::seconds(2);
// What the end of a wait may take until the store has answered once more.
constexpr auto kSlack = std::chrono::seconds(1);

// False when the key was not there within `time`.
bool wait_a_while(c10d::Store& store, const std::string& key,
                  std::chrono::milliseconds time) {
  try {
    return await_keys(store, {key}, time);
  } catch (const c10::DistNetworkError& error) {
    TS_CHECK_REACH(false, "the rendezvous store does not answer: ",
                   error.what_without_backtrace());
  }
}

constexpr const char* kSilent =
    "the rendezvous store does not answer: rank 0, which serves it, is stopped "
    "or cut off.";

// c10d waits for ever for a store whose host was cut off or stopped.
bool ends_in_time(std::chrono::milliseconds timeout,
                  const std::function<void()>& wait) {
  const auto question = [wait, context = rank_context()] {
    const RankContextGuard guard(context);
    wait();
  };
  return ask_in_time(question, timeout + kSlack);
}

void in_time(std::chrono::milliseconds timeout, const std::string& what,
             const std::function<void()>& wait) {
  TS_CHECK_REACH(ends_in_time(timeout, wait), "waited ", timeout.count(),
                 " ms for ", what, ", and ", kSilent);
}

}  // namespace

Rendezvous::Rendezvous(c10::intrusive_ptr<c10d::Store> store,
                       std::string prefix)
    : store_(std::move(store)), prefix_(std::move(prefix)) {}

void Rendezvous::set(const std::string& key, const std::string& value) {
  group_store()->set(key, value);
}

std::string Rendezvous::get(const std::string& key,
                            std::chrono::milliseconds timeout,
                            const std::string& what) {
  const auto found = std::make_shared<std::string>();
  in_time(timeout, what, [self = *this, key, timeout, what, found]() mutable {
    *found = self.wait_for(key, Clock::now() + timeout, timeout, what);
  });
  return *found;
}

std::vector<std::string> Rendezvous::get_each(const std::string& prefix,
                                              int64_t size,
                                              std::chrono::milliseconds timeout,
                                              const std::string& what) {
  const auto found = std::make_shared<std::vector<std::string>>();
  in_time(timeout, c10::str(what, "s 0 to ", size - 1),
          [self = *this, prefix, size, timeout, what, found]() mutable {
            const auto end = Clock::now() + timeout;
            for (int64_t r = 0; r < size; ++r) {
              found->push_back(self.wait_for(c10::str(prefix, r), end, timeout,
                                             c10::str(what, " ", r)));
            }
          });
  return *found;
}

std::string Rendezvous::wait_for(const std::string& key, Clock::time_point end,
                                 std::chrono::milliseconds timeout,
                                 const std::string& what) {
  const auto store = group_store();
  while (!wait_a_while(*store, key, std::min(kSlice, timeout))) {
    throw_announced();
    TS_CHECK_REACH(Clock::now() < end, "waited ", timeout.count(), " ms for ",
                   what, ", in vain.");
  }
  return store->get_to_str(key);
}

void Rendezvous::meet(int64_t rank, int64_t size,
                      std::chrono::milliseconds timeout) {
  set(c10::str("here-", rank), "1");
  get_each("here-", size, timeout, "group rank");
}

void Rendezvous::check_no_failure(std::chrono::milliseconds timeout) {
  const auto ask = [self = *this]() mutable { self.throw_announced(); };
  TS_CHECK_REACH(ends_in_time(timeout, ask), kSilent);
}

void Rendezvous::throw_announced() {
  if (!store_->check({kFailureKey})) return;
  TS_CHECK_REACH(false, store_->get_to_str(kFailureKey));
}

void Rendezvous::announce_failure(const std::string& why) noexcept {
  try {
    const auto announce = [store = store_, why] {
      // The first one stays: what follows is its consequence.
      store->compareSet(kFailureKey, "", why);
    };
    if (ask_in_time(announce, kAnnouncePatience)) return;
    log::debug("the store does not answer; the peers will find out.");
  } catch (const std::exception& error) {
    log::debug("the peers will find out by themselves: ", message_of(error));
  }
}

c10::intrusive_ptr<c10d::Store> Rendezvous::group_store() const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix_, store_);
}

}  // namespace tessera::comm
