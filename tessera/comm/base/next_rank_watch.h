// Whether the rank behind this one still lives.
//
// Ranks are a ring, each watched by the one before it. On one host that looks
// whether the process is stopped, or gone, by its number; between hosts the one
// that is watched sets a key again and again, whatever its program is doing.
// A rank that ends says how. The launcher, and the lines that close with it,
// may tell earlier of one that has died or failed: here it counts as any other
// that is silent.
//
// Comm: three keys when it begins, one when it ends; one that the first rank of
//       a host sets at every beat(), and the last rank of the host before reads
//       at every look().
// Time: counted in looks, so that none passes while this process is stopped
//       itself, as by a batch system that suspends a job.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/comm/base/report.h"

namespace tessera::comm {

// The key under which a rank says where it is, and what it says.
std::string where_key(int64_t rank);
std::string whereabouts_here();
Whereabouts whereabouts_of(const std::string& text);

class NextRankWatch {
 public:
  // A look each second: whose silence is told after `most` in a row, of 2 at
  // least.
  NextRankWatch(int64_t rank, int64_t world_size, int64_t most);

  // From now on a sign of life is expected of this rank, of which the first may
  // never come. After it has said where it is.
  void begin(c10d::Store& store) const;
  // Tells who watches this rank that it lives. More often than looks are.
  void beat(c10d::Store& store);
  // Why the next rank counts as lost; "": it does not. Without a store that
  // answers it alone is told that a rank of this host is stopped.
  std::string look(c10d::Store* store);
  // This rank ends: nobody misses it, unless it `failed`.
  void leave(c10d::Store& store, bool failed) const;

 private:
  bool is_elsewhere(const std::optional<Whereabouts>& where) const;
  // What is wrong with the next rank; "": nothing.
  std::string_view ailment_now(c10d::Store* store);
  std::string_view ailment_there(c10d::Store& store);

  const int64_t rank_, next_rank_, rank_before_;
  const int64_t most_;
  const uint64_t host_hash_;
  std::optional<Whereabouts> next_, before_;
  int64_t beats_ = 0;  // set, behind the one of begin()
  std::string heard_;  // the newest of the next rank; "": none
  std::string_view ailment_;
  int64_t silent_ = 0;  // looks in a row with this one
};

}  // namespace tessera::comm
