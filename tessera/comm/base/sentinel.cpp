#include "tessera/comm/base/sentinel.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>

#include "tessera/comm/base/in_time.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/host.h"
#include "tessera/core/log.h"
#include "tessera/core/thread_stack.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(200);
// How long the judge waits for reports: some looks.
constexpr auto kPatience = std::chrono::milliseconds(800);
// And for a store that may have been cut off. Together with the end of the rank
// they stay within the two seconds that follow a time-out.
constexpr auto kStorePatience = std::chrono::milliseconds(600);
constexpr const char* kAskKey = "ask";

std::string where_key(int64_t rank) { return c10::str("where-", rank); }
std::string report_key(int64_t rank) { return c10::str("report-", rank); }

Whereabouts whereabouts_of(const std::string& text) {
  Whereabouts where;
  std::istringstream(text) >> where.pid >> where.space >> where.host;
  return where;
}

std::string record_folder_or(const std::string& given) {
  const char* named = std::getenv("TESSERA_FLIGHT_RECORD");
  return !given.empty() || named == nullptr ? given : named;
}

}  // namespace

struct Sentinel::State {
  State(Rendezvous with, int64_t of, std::string folder,
        std::function<RankReport()> reporter)
      : rendezvous(std::move(with)),
        rank(of),
        record_folder(std::move(folder)),
        report(std::move(reporter)) {}

  void loop();
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
  const int64_t rank;
  const pid_t thread = this_thread();  // of the rank
  const std::string record_folder;
  const std::function<RankReport()> report;
  std::mutex mutex;
  std::condition_variable changed;
  bool closing = false;
  bool answered = false;
  bool judged = false;
  bool ended = false;  // the loop
  bool store_is_silent = false;
  Whereabouts first;  // of rank 0, whose process often serves the store
};

Sentinel::Sentinel(Rendezvous rendezvous, int64_t rank,
                   const std::string& record_folder,
                   std::function<RankReport()> report)
    : state_(std::make_shared<State>(std::move(rendezvous), rank,
                                     record_folder_or(record_folder),
                                     std::move(report))) {
  state_->rendezvous.set(
      where_key(rank),
      c10::str(getpid(), ' ', process_space(), ' ', host_name()));
  thread_ = std::thread([state = state_] { state->loop(); });
}

Sentinel::~Sentinel() {
  bool ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->closing = true;
    state_->changed.notify_all();
    const auto patience =
        state_->store_is_silent ? Clock::duration::zero() : kStorePatience;
    ended =
        state_->changed.wait_for(lock, patience, [&] { return state_->ended; });
  }
  ended ? thread_.join() : thread_.detach();
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
    own = state_->report();
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

void Sentinel::State::loop() {
  const auto store = rendezvous.group_store();
  try {
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, kLook, [&] { return closing; })) {
      lock.unlock();
      look_up_host_of_store(*store);
      const bool asked = store->check({kAskKey});
      if (asked) answer(true);
      lock.lock();
      if (asked) break;
    }
  } catch (const std::exception& error) {
    // The store went with its host: nobody can ask any more.
    log::debug("the store does not answer: ", message_of(error));
  }
  const std::lock_guard lock(mutex);
  ended = true;
  changed.notify_all();
}

void Sentinel::State::answer(bool asked) {
  RankReport own;
  {
    const std::lock_guard lock(mutex);
    if (closing || std::exchange(answered, true)) return;
    own = report();
  }
  if (asked) own.stack = stack_of(thread);
  write_record(own);
  rendezvous.set(report_key(rank), to_json(own));
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
