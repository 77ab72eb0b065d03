#include "tessera/comm/base/rendezvous.h"

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/base/in_time.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::comm {
namespace {

constexpr const char* kFailureKey = "failure";
// How soon a waiting rank looks again, and whether another one failed.
constexpr auto kSlice = std::chrono::milliseconds(20);
constexpr auto kAnnouncePatience = std::chrono::seconds(2);

// False when the key was not there within `time`. It asks again and again: a
// TCPStore that is told to wait prints a warning whenever the time is up.
bool wait_a_while(c10d::Store& store, const std::string& key,
                  std::chrono::milliseconds time) {
  try {
    const auto end = std::chrono::steady_clock::now() + time;
    auto pause = std::chrono::milliseconds(1);
    while (!store.check({key})) {
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kSlice);
    }
    return true;
  } catch (const c10::DistNetworkError& error) {
    TS_CHECK_REACH(false, "the rendezvous store does not answer: ",
                   error.what_without_backtrace());
  }
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
  for (int64_t r = 0; r < size; ++r) {
    get(c10::str("here-", r), timeout, c10::str("rank ", r, " of the group"));
  }
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
