#include "tessera/comm/base/next_rank_watch.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "tessera/core/hash.h"
#include "tessera/core/host.h"

namespace tessera::comm {
namespace {

constexpr const char* kLeft = "left";

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

bool NextRankWatch::is_silent_there(c10d::Store& store) {
  const std::string key = beat_key(next_rank_);
  if (!store.check({key})) return false;  // it does not beat
  const std::string beat = store.get_to_str(key);
  const bool is_news = beat != std::exchange(heard_, beat);
  return !is_news && beat != kLeft;
}

std::string NextRankWatch::look(c10d::Store* store) {
  if (!next_ && store != nullptr) next_ = find(*store, next_rank_);
  if (!next_) return "";
  const bool is_there = is_elsewhere(next_);
  if (is_there && store == nullptr) return "";
  if (!is_there && next_->pid == ::getpid()) return "";  // a thread
  const bool is_silent =
      is_there ? is_silent_there(*store) : is_stopped(*next_);
  silent_ = is_silent ? silent_ + 1 : 0;
  if (silent_ < most_) return "";
  return c10::str(
      "rank ", next_rank_, " (pid ", next_->pid, " on ", next_->host, ") ",
      is_there ? "has given no sign of life" : "has been stopped", " for ",
      silent_, " s", is_there ? ": it is stopped, or its host cut off" : "");
}

void NextRankWatch::leave(c10d::Store& store) const {
  if (!before_ || is_elsewhere(before_)) store.set(beat_key(rank_), kLeft);
}

}  // namespace tessera::comm
