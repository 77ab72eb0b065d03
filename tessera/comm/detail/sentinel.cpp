#include "tessera/comm/detail/sentinel.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <sstream>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/host.h"
#include "tessera/core/log.h"

namespace tessera::comm {
namespace {

constexpr auto kLook = std::chrono::milliseconds(200);
// How long the judge waits for reports: some looks.
constexpr auto kPatience = std::chrono::milliseconds(1000);
constexpr const char* kAskKey = "ask";

std::string where_key(int64_t rank) { return c10::str("where-", rank); }
std::string report_key(int64_t rank) { return c10::str("report-", rank); }

std::string record_folder_or(const std::string& given) {
  const char* named = std::getenv("TESSERA_FLIGHT_RECORD");
  return !given.empty() || named == nullptr ? given : named;
}

}  // namespace

Sentinel::Sentinel(Rendezvous rendezvous, int64_t rank,
                   std::string record_folder,
                   std::function<RankReport()> report)
    : rendezvous_(std::move(rendezvous)),
      rank_(rank),
      record_folder_(record_folder_or(record_folder)),
      report_(std::move(report)) {
  rendezvous_.set(where_key(rank_), c10::str(getpid(), ' ', host_name()));
  thread_ = std::thread([this] { loop(); });
}

Sentinel::~Sentinel() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Sentinel::loop() {
  const auto store = rendezvous_.group_store();
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [&] { return closing_; })) {
    lock.unlock();
    try {
      if (store->check({kAskKey})) {
        answer();
        return;
      }
    } catch (const std::exception& error) {
      // The store went with its host: nobody can ask any more.
      log::debug("the store does not answer: ", message_of(error));
      return;
    }
    lock.lock();
  }
}

void Sentinel::answer() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(answered_, true)) return;
  }
  const RankReport report = report_();
  rendezvous_.set(report_key(rank_), to_json(report));
  write_record(report);
}

void Sentinel::write_record(const RankReport& report) const {
  if (record_folder_.empty()) return;
  write_file_atomic(std::filesystem::path(record_folder_) /
                        c10::str("flight-rank-", report.rank, ".json"),
                    to_json(report) + "\n");
}

std::optional<std::string> Sentinel::wait_for(
    c10d::Store& store, const std::string& key,
    std::chrono::steady_clock::time_point end) {
  std::unique_lock lock(mutex_);
  while (!store.check({key})) {
    if (std::chrono::steady_clock::now() > end) return std::nullopt;
    changed_.wait_for(lock, kLook / 8);
  }
  return store.get_to_str(key);
}

std::string Sentinel::judge(const GroupReport& group, uint64_t sequence,
                            const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(judged_, true)) return "";
  }
  try {
    const auto store = rendezvous_.group_store();
    store->set(kAskKey, why);
    answer();
    const auto end = std::chrono::steady_clock::now() + kPatience;
    std::map<int64_t, RankReport> reports;
    std::map<int64_t, Whereabouts> whereabouts;
    for (const int64_t rank : group.ranks) {
      const auto text = wait_for(*store, report_key(rank), end);
      const auto report = text ? report_of_json(*text) : std::nullopt;
      if (report) reports.emplace(rank, *report);
      if (!store->check({where_key(rank)})) continue;
      std::istringstream where(store->get_to_str(where_key(rank)));
      where >> whereabouts[rank].pid >> whereabouts[rank].host;
    }
    return verdict_on(group, sequence, reports, whereabouts);
  } catch (const std::exception& error) {
    return c10::str("no verdict, for the store does not answer: ",
                    message_of(error));
  }
}

}  // namespace tessera::comm
