#include "tessera/comm/base/sentinel.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>

#include "tessera/comm/base/in_time.h"
#include "tessera/comm/base/next_rank_watch.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/thread_stack.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(200);
// Then again after twice as long, until it is known who serves the store.
constexpr auto kFirstLook = std::chrono::milliseconds(5);
constexpr auto kBeat = std::chrono::milliseconds(1000);  // looks at peers
// How long the judge waits for reports: some looks.
constexpr auto kPatience = std::chrono::milliseconds(800);
// And for a store that may have been cut off. Together with the end of the rank
// they stay within the two seconds that follow a time-out.
constexpr auto kStorePatience = std::chrono::milliseconds(600);
// With rank 0 the store often ends, in which others have yet to see why.
constexpr auto kLinger = 4 * kLook;
constexpr const char* kAskKey = "ask";
constexpr const char* kLostKey = "lost";

std::string report_key(int64_t rank) { return c10::str("report-", rank); }

// It may be gone by then.
void tell_all_of(c10d::Store& store, const std::string& lost) {
  try {
    store.set(kLostKey, lost);
    store.set(kAskKey, lost);
  } catch (const std::exception& error) {
    log::debug("the store does not answer: ", message_of(error));
  }
}

std::string record_folder_or(const std::string& given) {
  const char* named = std::getenv("TESSERA_FLIGHT_RECORD");
  return !given.empty() || named == nullptr ? given : named;
}

}  // namespace

struct Sentinel::State {
  State(Rendezvous with, SentinelOptions given)
      : rendezvous(std::move(with)),
        options(std::move(given)),
        record_folder(record_folder_or(options.record_folder)),
        next_rank(rank, options.world_size, silence / kBeat) {}

  // The thread that asks the store; it may never answer.
  void ask_store();
  void look(c10d::Store& store, int64_t looks);
  // The thread that sees to it that the other one gets its answers.
  void watch_store();
  void give_up(const std::string& why, bool store_answers);
  bool watches() const;
  // REQUIRES: the lock.
  void fails() {
    if (!failed_at) failed_at = Clock::now();
  }
  // With the stack, where another rank has `asked`.
  void answer(bool asked);
  void write_record(const RankReport& own) const;
  void look_up_host_of_store(c10d::Store& store);
  std::string judge(const Question& question);
  std::string silence_of_store();
  std::optional<std::string> wait_for(c10d::Store& store,
                                      const std::string& key,
                                      Clock::time_point end);

  Rendezvous rendezvous;
  const SentinelOptions options;
  const int64_t rank = options.rank;
  // Of two looks at least.
  const std::chrono::milliseconds silence =
      options.silence.count() > 0 ? std::max(options.silence, 2 * kBeat)
                                  : options.silence;
  const pid_t thread = this_thread();  // of the rank
  const std::string record_folder;
  NextRankWatch next_rank;  // of the thread that asks
  std::mutex mutex;
  std::condition_variable changed;
  bool is_closed = false;
  bool closing = false;
  bool ends_badly = false;
  bool answered = false;
  bool judged = false;
  std::optional<Clock::time_point> failed_at;  // none: it did not
  bool is_answering = false;
  bool recorded = false;
  bool gives_up = false;  // options.lost is being called
  std::string lost;       // why all is given up; "": it is not
  int64_t answers = 0;    // of the store
  bool ended = false;     // the thread that asks
  bool store_is_silent = false;
  Whereabouts first;  // of rank 0, whose process often serves the store
};

Sentinel::Sentinel(Rendezvous rendezvous, SentinelOptions options)
    : state_(
          std::make_shared<State>(std::move(rendezvous), std::move(options))) {
  state_->rendezvous.set(where_key(state_->rank), whereabouts_here());
  if (state_->watches()) {
    state_->next_rank.begin(*state_->rendezvous.group_store());
    watches_ = std::thread([state = state_] { state->watch_store(); });
  }
  try {
    asks_ = std::thread([state = state_] { state->ask_store(); });
  } catch (...) {
    state_->ended = true;
    close();
    throw;
  }
}

Sentinel::~Sentinel() { close(); }

void Sentinel::close(bool failed) {
  std::unique_lock lock(state_->mutex);
  if (std::exchange(state_->is_closed, true)) return;
  state_->ends_badly = failed;
  if (state_->rank == 0 && state_->failed_at && !state_->store_is_silent) {
    const auto end = *state_->failed_at + kLinger;
    lock.unlock();
    std::this_thread::sleep_until(end);
    lock.lock();
  }
  state_->closing = true;
  state_->changed.notify_all();
  state_->changed.wait(lock, [&] { return !state_->gives_up; });
  // A rank that ends well says so, also to a store that is slow.
  std::chrono::milliseconds patience = kStorePatience;
  if (!state_->failed_at) patience = std::max(patience, state_->silence);
  if (state_->store_is_silent) patience = {};
  const bool ended =
      state_->changed.wait_for(lock, patience, [&] { return state_->ended; });
  lock.unlock();
  if (asks_.joinable()) ended ? asks_.join() : asks_.detach();
  if (watches_.joinable()) watches_.join();
}

std::string Sentinel::judge(const Question& question) {
  try {
    const auto verdict = std::make_shared<std::string>();
    const bool answered =
        ask_in_time([state = state_, verdict,
                     question] { *verdict = state->judge(question); },
                    kPatience + kStorePatience);
    if (answered) return *verdict;
  } catch (const std::exception& error) {
    log::debug("the store failed: ", message_of(error));
  }
  return state_->silence_of_store();
}

void Sentinel::record() {
  RankReport own;
  {
    const std::lock_guard lock(state_->mutex);
    state_->fails();
    if (state_->closing || std::exchange(state_->recorded, true)) return;
    own = state_->options.report();
  }
  state_->write_record(own);
}

bool Sentinel::store_is_silent() const {
  const std::lock_guard lock(state_->mutex);
  return state_->store_is_silent;
}

std::string Sentinel::State::silence_of_store() {
  const std::lock_guard lock(mutex);
  store_is_silent = true;
  const auto fate = fate_of(first);
  return fate ? c10::str("rank 0 ", *fate)
              : "none, for the store of the rendezvous does not answer";
}

bool Sentinel::State::watches() const { return silence.count() > 0; }

void Sentinel::State::look(c10d::Store& store, int64_t looks) {
  look_up_host_of_store(store);
  std::string lost;
  if (watches()) {
    next_rank.beat(store);
    if (looks % (kBeat / kLook) == 0) lost = next_rank.look(&store);
  }
  const bool asked = store.check({kAskKey});
  if (!lost.empty()) {
    tell_all_of(store, lost);
  } else if (asked && store.check({kLostKey})) {
    lost = store.get_to_str(kLostKey);
  }
  if (!lost.empty()) {
    give_up(lost, /*store_answers=*/true);
  } else if (asked) {
    answer(true);
  }
}

void Sentinel::State::ask_store() {
  auto store = rendezvous.group_store();
  std::unique_lock lock(mutex);
  const auto is_over = [&] { return closing || !lost.empty(); };
  const auto ask = [&](const auto& question) {
    lock.unlock();
    try {
      question();
    } catch (const std::exception& error) {
      // It went with its host: nobody can ask any more.
      log::debug("the store does not answer: ", message_of(error));
      store.reset();
    }
    lock.lock();
    ++answers;
  };
  // It may fall silent before the first look.
  for (std::chrono::milliseconds pause = kFirstLook;
       store && first.pid == 0 && pause < kLook && !is_over(); pause *= 2) {
    ask([&] { look_up_host_of_store(*store); });
    if (first.pid == 0) changed.wait_for(lock, pause, is_over);
  }
  for (int64_t looks = 0; !changed.wait_for(lock, kLook, is_over); ++looks) {
    ask([&] {
      if (store) {
        look(*store, looks);
      } else if (watches() && looks % (kBeat / kLook) == 0) {
        const std::string why = next_rank.look(nullptr);
        if (!why.empty()) give_up(why, /*store_answers=*/false);
      }
    });
  }
  const bool leaves = watches() && store && !store_is_silent;
  const bool failed = ends_badly || failed_at;
  lock.unlock();
  try {
    if (leaves) next_rank.leave(*store, failed);
  } catch (const std::exception& error) {
    log::debug("the store does not answer: ", message_of(error));
  }
  lock.lock();
  ended = true;
  changed.notify_all();
}

void Sentinel::State::watch_store() {
  std::unique_lock lock(mutex);
  int64_t seen = answers, silent = 0;  // slices in a row without an answer
  while (!changed.wait_for(lock, kLook,
                           [&] { return closing || ended || !lost.empty(); })) {
    silent = std::exchange(seen, answers) == answers ? silent + 1 : 0;
    if (is_answering) silent = 0;
    if (silent * kLook < silence) continue;
    store_is_silent = true;
    const auto fate = fate_of(first);
    lock.unlock();
    give_up(c10::str("the store of the rendezvous has not answered for ",
                     silence / kBeat, " s", fate ? ": rank 0 " + *fate : ""),
            /*store_answers=*/false);
    return;
  }
}

// Without the lock: groups that fail ask for this rank's record.
void Sentinel::State::give_up(const std::string& why, bool store_answers) {
  {
    const std::lock_guard lock(mutex);
    fails();
    if (closing || !std::exchange(lost, why).empty()) return;
    gives_up = true;
  }
  try {
    options.lost(why, store_answers);
  } catch (const std::exception& error) {
    log::warning(why, ", and not all operations fail: ", message_of(error));
  }
  const std::lock_guard lock(mutex);
  gives_up = false;
  changed.notify_all();
}

void Sentinel::State::answer(bool asked) {
  RankReport own;
  {
    const std::lock_guard lock(mutex);
    if (closing || std::exchange(answered, true)) return;
    own = options.report();
    is_answering = asked;
  }
  try {
    if (asked) own.stack = stack_of(thread);
    write_record(own);
    rendezvous.set(report_key(rank), to_json(own));
  } catch (const std::exception& error) {
    log::debug("no report: ", message_of(error));
  }
  const std::lock_guard lock(mutex);
  is_answering = false;
}

void Sentinel::State::look_up_host_of_store(c10d::Store& store) {
  if (first.pid != 0 || !store.check({where_key(0)})) return;
  const Whereabouts found = whereabouts_of(store.get_to_str(where_key(0)));
  const std::lock_guard lock(mutex);
  first = found;
}

void Sentinel::State::write_record(const RankReport& own) const {
  if (record_folder.empty()) return;
  try {
    write_file_atomic(std::filesystem::path(record_folder) /
                          c10::str("flight-rank-", own.rank, ".json"),
                      to_json(own) + "\n");
  } catch (const std::exception& error) {
    log::warning("no flight record: ", message_of(error));
  }
}

std::string Sentinel::State::judge(const Question& question) {
  {
    const std::lock_guard lock(mutex);
    fails();
    if (std::exchange(judged, true)) return "";
  }
  const auto store = rendezvous.group_store();
  answer(false);  // first: its record needs no store
  store->set(kAskKey, question.why);
  const auto end = Clock::now() + kPatience;
  std::map<int64_t, RankReport> reports;
  std::map<int64_t, Whereabouts> whereabouts;
  std::vector<int64_t> asked = question.group.ranks;
  const auto ask = [&](int64_t peer) {
    const auto text = wait_for(*store, report_key(peer), end);
    const auto read = text ? report_of_json(*text) : std::nullopt;
    if (read) reports.emplace(peer, *read);
    if (!store->check({where_key(peer)})) return;
    whereabouts[peer] = whereabouts_of(store->get_to_str(where_key(peer)));
  };
  for (const int64_t peer : question.group.ranks) ask(peer);
  // Where all of them answer, whom they wait for in other groups, until one
  // does not: on a mesh of two axes the cause is seldom a rank of this group.
  for (size_t i = 0; i < asked.size(); ++i) {
    if (reports.size() < asked.size() || Clock::now() > end) break;
    for (const int64_t peer : awaited_by(reports.at(asked[i]))) {
      if (std::ranges::count(asked, peer) > 0) continue;
      asked.push_back(peer);
      ask(peer);
    }
  }
  return verdict_on(question, reports, whereabouts);
}

std::optional<std::string> Sentinel::State::wait_for(c10d::Store& store,
                                                     const std::string& key,
                                                     Clock::time_point end) {
  while (!store.check({key})) {
    std::unique_lock lock(mutex);
    if (Clock::now() > end) return std::nullopt;
    changed.wait_for(lock, kLook / 8);
  }
  return store.get_to_str(key);
}

}  // namespace tessera::comm
