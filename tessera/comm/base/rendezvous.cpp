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

// c10d waits for ever for a store whose host was cut off or stopped.
void in_time(std::chrono::milliseconds timeout, const std::string& what,
             const std::function<void()>& wait) {
  const auto question = [wait, context = rank_context()] {
    const RankContextGuard guard(context);
    wait();
  };
  TS_CHECK_REACH(ask_in_time(question, timeout + kSlack), "waited ",
                 timeout.count(), " ms for ", what,
                 ", and the rendezvous store does not answer: rank 0, which "
                 "serves it, is stopped or cut off.");
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
    *found = self.wait_for(key, timeout, what);
  });
  return *found;
}

std::string Rendezvous::wait_for(const std::string& key,
                                 std::chrono::milliseconds timeout,
                                 const std::string& what) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  const auto store = group_store();
  while (!wait_a_while(*store, key, std::min(kSlice, timeout))) {
    check_no_failure();
    TS_CHECK_REACH(std::chrono::steady_clock::now() < end, "waited ",
                   timeout.count(), " ms for ", what, ", in vain.");
  }
  return store->get_to_str(key);
}

void Rendezvous::meet(int64_t rank, int64_t size,
                      std::chrono::milliseconds timeout) {
  set(c10::str("here-", rank), "1");
  in_time(timeout, "the ranks of a group",
          [self = *this, size, timeout]() mutable {
            const auto end = std::chrono::steady_clock::now() + timeout;
            for (int64_t r = 0; r < size; ++r) {
              const auto left = std::chrono::ceil<std::chrono::milliseconds>(
                  end - std::chrono::steady_clock::now());
              self.wait_for(c10::str("here-", r),
                            std::max(left, std::chrono::milliseconds(1)),
                            c10::str("rank ", r, " of the group"));
            }
          });
}

void Rendezvous::check_no_failure() {
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
