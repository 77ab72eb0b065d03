#include "tessera/launch/detail/roll_call.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "tessera/core/host.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/launch/detail/deadline.h"
#include "tessera/launch/store.h"

namespace tessera::launch::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kRefusal = "refusal";
constexpr auto kLook = std::chrono::milliseconds(50);
// How often rank 0 says whom it waits for.
constexpr auto kSay = std::chrono::seconds(5);

std::string key_of(int64_t rank) { return "rank/" + std::to_string(rank); }
std::string heard_key(int64_t rank) { return "heard/" + std::to_string(rank); }

std::vector<std::string> keys_of_all(const RankEnvironment& here,
                                     std::string (*key)(int64_t)) {
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < here.world_size; ++rank) {
    keys.push_back(key(rank));
  }
  return keys;
}

// "HOST/BOOT pid NUMBER/NONCE": no two processes say the same.
std::string introduce() {
  std::random_device random;
  return c10::str(host_identity(), " pid ", getpid(), "/", random());
}

std::string host_part(const std::string& introduction) {
  return introduction.substr(0, introduction.rfind(" pid "));
}

// "HOST, process PID" for people.
std::string readable(const std::string& introduction) {
  const size_t pid = introduction.rfind(" pid ");
  return c10::str(
      host_name_in(introduction), ", process ",
      introduction.substr(pid + 5, introduction.rfind('/') - pid - 5));
}

bool are_there(c10d::Store& store, const std::vector<std::string>& keys,
               std::chrono::milliseconds patience) {
  try {
    store.wait(keys, patience);
    return true;
  } catch (const c10::Error&) {  // of each kind of store another one
    return store.check(keys);
  }
}

std::string absent_ranks(c10d::Store& store, int64_t world_size) {
  constexpr size_t kNamedAtMost = 20;
  std::vector<std::string> absent;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    if (!store.check({key_of(rank)})) absent.push_back(std::to_string(rank));
  }
  return c10::str(absent.size() == 1 ? "rank " : "ranks ",
                  some_of(absent, kNamedAtMost));
}

// Of "CODE WORDS", which anybody may have written who reaches the store.
ExitCode code_in(const std::string& said) {
  int code = 0;
  std::from_chars(said.data(), said.data() + said.size(), code);
  return code > 0 && code < 128 ? static_cast<ExitCode>(code)
                                : ExitCode::kFailed;
}

}  // namespace

void answer_the_roll(const RankEnvironment& here, c10d::Store& store) {
  const std::string world = std::to_string(here.world_size);
  const std::string agreed = store.compareSet("world", "", world);
  TS_CHECK_CONFIG(agreed == world, "launch: rank ", here.rank,
                  " was told of a world of ", world,
                  " ranks, its peers of one of ", agreed,
                  ". Start all ranks with the same world size.");
  const std::string me = introduce();
  const std::string holder = store.compareSet(key_of(here.rank), "", me);
  TS_CHECK_CONFIG(holder == me, "launch: rank ", here.rank,
                  " is there already (", readable(holder),
                  "). Give each process a rank of its own.");
}

void await_all(const RankEnvironment& here, c10d::Store& store) {
  using std::chrono::milliseconds, std::chrono::seconds;
  // Rank 0 serves: the others give up before it does, so that each can still
  // read who is absent, and it says so meanwhile. c10d rounds its waits up to
  // seconds.
  auto patience = here.join_timeout, say = patience;
  if (here.rank == 0) {
    say = std::clamp(std::chrono::duration_cast<seconds>(patience / 3),
                     seconds(1), kSay);
  } else {
    patience -= std::min(patience / 2, kDeadlineSlack);
  }
  const auto keys = keys_of_all(here, key_of);
  const auto end = Clock::now() + patience;
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(end - Clock::now());
    if (are_there(store, keys, std::clamp(left, milliseconds(1), say))) return;
    const std::string absent =
        c10::str(absent_ranks(store, here.world_size), " of ", here.world_size);
    if (left > say) {
      log::warning("launch: ", absent, " did not come yet.");
      continue;
    }
    // One that was refused is the cause, where others did not come at all.
    check_no_refusal(here, store);
    TS_CHECK_REACH(false, "launch: after ", in_seconds(patience), " s ", absent,
                   " did not come. Look at the logs of those; for slow hosts "
                   "set TESSERA_JOIN_TIMEOUT_S.");
  }
}

void complete_places(RankEnvironment& here, c10d::Store& store) {
  if (here.local_rank >= 0 && here.local_world_size >= 0 && here.node >= 0) {
    return;
  }
  const std::string my_host = host_part(store.get_to_str(key_of(here.rank)));
  std::vector<std::string> hosts;  // in the order of their first rank
  int64_t local_rank = 0, local_world_size = 0;
  for (int64_t rank = 0; rank < here.world_size; ++rank) {
    const std::string host = host_part(store.get_to_str(key_of(rank)));
    if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) {
      hosts.push_back(host);
    }
    if (host != my_host) continue;
    ++local_world_size;
    if (rank < here.rank) ++local_rank;
  }
  here.local_rank = local_rank;
  here.local_world_size = local_world_size;
  here.node = std::find(hosts.begin(), hosts.end(), my_host) - hosts.begin();
}

std::string whereabouts_of(int64_t rank, c10d::Store& store) {
  return readable(store.get_to_str(key_of(rank)));
}

void leave_refusal(const RankEnvironment& here, c10d::Store& store,
                   const Error& error, std::chrono::milliseconds patience) {
  const std::string mine =
      c10::str(static_cast<int>(error.exit_code()), " rank ", here.rank, " (",
               whereabouts_of(here.rank, store),
               ") could not begin: ", message_of(error));
  const bool is_first = store.compareSet(kRefusal, "", mine) == mine;
  store.set(kDecided, "1");
  store.set(heard_key(here.rank), "1");
  const bool may_end_it = here.rendezvous.served_elsewhere
                              ? is_first || here.rank == 0
                              : here.rank == 0;
  if (!may_end_it) return;
  const auto all = keys_of_all(here, heard_key);
  const auto end = Clock::now() + patience;
  while (!store.check(all) && Clock::now() < end) {
    std::this_thread::sleep_for(kLook);
  }
}

void check_no_refusal(const RankEnvironment& here, c10d::Store& store) {
  if (!store.check({kRefusal})) return;
  const std::string said = store.get_to_str(kRefusal);
  store.set(heard_key(here.rank), "1");
  throw PeerRefused(code_in(said), said.substr(said.find(' ') + 1));
}

}  // namespace tessera::launch::detail
