// What a rank reports of itself when a rank of its communicator has failed, and
// the verdict that follows from the reports of all.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/base/flight_recorder.h"

namespace tessera::comm {

struct GroupReport {
  std::string name;
  std::vector<int64_t> ranks;                   // global
  std::vector<FlightRecorder::Record> records;  // oldest first
};

struct RankReport {
  int64_t rank = 0;
  std::vector<GroupReport> groups;
  // Functions that the rank's thread is in, the innermost first; none: not
  // known.
  std::vector<std::string> stack = {};
};

std::string to_json(const RankReport& report);
// nullopt: not such a report.
std::optional<RankReport> report_of_json(const std::string& text);

// Where a rank lives, for those who ask why it does not answer.
struct Whereabouts {
  std::string host;  // its name
  int64_t pid = 0;
  std::string space;       // process_space(): where the number is its
  uint64_t host_hash = 0;  // of host_identity()
};

// What a rank asks when an operation of it has failed.
struct Question {
  GroupReport group;  // as this rank knows it
  Operation failed;
  std::string why;
  bool ranks_differ = false;  // in what they called until then
};

// The other ranks of the groups in which this one stands still, or failed.
std::vector<int64_t> awaited_by(const RankReport& report);

// Of the ranks of the group at a collective that failed: who has not come to
// it, what it did last and what it stands in, who calls something else there,
// and who does not answer ("is stopped", "has died", where its host is this
// one). "" when all came and called the same. Where the ranks differ: what they
// called at the first at which they do; "" where that is not kept any more. Of
// a message that failed: who does not answer; if all do, what its peer did
// last. Ranks outside of the group that were asked too (those with whereabouts)
// are named where they do not answer.
std::string verdict_on(const Question& question,
                       const std::map<int64_t, RankReport>& reports,
                       const std::map<int64_t, Whereabouts>& whereabouts);

// Of a process on this host: stopped by a signal, and no debugger; and ended,
// also where nobody has asked how.
bool is_stopped(const Whereabouts& where);
bool is_gone(const Whereabouts& where);

// "is stopped (pid 7 on host), by a signal or a debugger", "has died ...";
// nullopt where it cannot be told, or is neither.
std::optional<std::string> fate_of(const Whereabouts& where);

}  // namespace tessera::comm
