#include "tessera/comm/base/next_rank_watch.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <utility>

#include "tessera/core/hash.h"
#include "tessera/core/host.h"

namespace tessera::comm {
namespace {

// In place of a beat.
constexpr const char* kLeft = "left";
constexpr const char* kFailed = "failed";
// For so many seconds.
constexpr std::string_view kIsSilent = "has given no sign of life";
constexpr std::string_view kIsStopped = "has been stopped";
constexpr std::string_view kHasDied = "has been dead";
constexpr std::string_view kHasFailed = "has been gone, having failed,";

std::string beat_key(int64_t rank) { return c10::str("beat-", rank); }

std::optional<Whereabouts> find(c10d::Store& store, int64_t rank) {
  if (!store.check({where_key(rank)})) return std::nullopt;
  return whereabouts_of(store.get_to_str(where_key(rank)));
}

}  // namespace

std::string where_key(int64_t rank) { return c10::str("where-", rank); }

std::string whereabouts_here() {
  return c10::str(::getpid(), ' ', process_space(), ' ',
                  hash64(host_identity()), ' ', host_name());
}

Whereabouts whereabouts_of(const std::string& text) {
  Whereabouts where;
  std::istringstream(text) >> where.pid >> where.space >> where.host_hash >>
      where.host;
  return where;
}

NextRankWatch::NextRankWatch(int64_t rank, int64_t world_size, int64_t most)
    : rank_(rank),
      next_rank_((rank + 1) % world_size),
      rank_before_((rank + world_size - 1) % world_size),
      most_(std::max<int64_t>(2, most)),
      host_hash_(hash64(host_identity())) {}

bool NextRankWatch::is_elsewhere(
    const std::optional<Whereabouts>& where) const {
  return where && where->host_hash != host_hash_;
}

void NextRankWatch::begin(c10d::Store& store) const {
  store.set(beat_key(rank_), "0");
}

void NextRankWatch::beat(c10d::Store& store) {
  if (!before_) before_ = find(store, rank_before_);
  if (!is_elsewhere(before_)) return;
  store.set(beat_key(rank_), std::to_string(++beats_));
}

std::string_view NextRankWatch::ailment_there(c10d::Store& store) {
  const std::string key = beat_key(next_rank_);
  if (!store.check({key})) return "";  // it does not beat
  const std::string beat = store.get_to_str(key);
  const bool is_news = beat != std::exchange(heard_, beat);
  if (is_news || beat == kLeft) return "";
  return beat == kFailed ? kHasFailed : kIsSilent;
}

std::string_view NextRankWatch::ailment_now(c10d::Store* store) {
  if (is_elsewhere(next_)) {
    return store != nullptr ? ailment_there(*store) : "";
  }
  if (next_->pid == ::getpid()) return "";  // a thread
  if (is_stopped(*next_)) return kIsStopped;
  if (store == nullptr || !is_gone(*next_)) return "";
  const std::string key = beat_key(next_rank_);
  const std::string said = store->check({key}) ? store->get_to_str(key) : "";
  if (said == kLeft) return "";
  return said == kFailed ? kHasFailed : kHasDied;
}

std::string NextRankWatch::look(c10d::Store* store) {
  if (!next_ && store != nullptr) next_ = find(*store, next_rank_);
  if (!next_) return "";
  const std::string_view ailment = ailment_now(store);
  if (ailment != std::exchange(ailment_, ailment)) silent_ = 0;
  silent_ = ailment.empty() ? 0 : silent_ + 1;
  if (silent_ < most_) return "";
  return c10::str(
      "rank ", next_rank_, " (pid ", next_->pid, " on ", next_->host, ") ",
      ailment, " for ", silent_, " s",
      ailment == kIsSilent ? ": it is stopped, or its host cut off" : "");
}

void NextRankWatch::leave(c10d::Store& store, bool failed) const {
  store.set(beat_key(rank_), failed ? kFailed : kLeft);
}

}  // namespace tessera::comm
