#include "tessera/comm/base/report.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <set>

#include "tessera/core/detail/json.h"
#include "tessera/core/host.h"

namespace tessera::comm {
namespace {

using nlohmann::json;
using Record = FlightRecorder::Record;
using State = FlightRecorder::State;

constexpr size_t kFramesNamed = 5;

constexpr std::array<const char*, 4> kStates = {"pending", "done", "failed",
                                                "refused"};

json json_of(const Record& record) {
  json one = {{"sequence", record.sequence},
              {"collective", record.collective},
              {"what", record.what},
              {"signature", record.signature},
              {"state", kStates.at(static_cast<size_t>(record.state))},
              {"seconds", record.seconds},
              {"seconds_ago", record.seconds_ago}};
  if (record.step >= 0) one["step"] = record.step;
  if (!record.doing.empty()) one["doing"] = record.doing;
  return one;
}

Record record_of(const json& one) {
  const auto state = std::find(kStates.begin(), kStates.end(),
                               one.at("state").get<std::string>());
  return {.sequence = one.at("sequence"),
          .collective = one.at("collective"),
          .what = one.at("what"),
          .signature = one.at("signature"),
          .state = static_cast<State>(state - kStates.begin()),
          .seconds = one.at("seconds"),
          .seconds_ago = one.at("seconds_ago"),
          .step = one.value("step", int64_t{-1}),
          .doing = one.value("doing", std::string())};
}

// "in Forward stage 0 micro-batch 3 of step 12"; "" outside of a step.
std::string place_of(const Record& record) {
  std::string place;
  if (!record.doing.empty()) place += " in " + record.doing;
  if (record.step >= 0) place += c10::str(" of step ", record.step);
  return place;
}

std::string last_of(const Record& record) {
  const std::string what = c10::str(record.what, place_of(record));
  if (record.state == State::kPending) {
    return c10::str("is in ", what, ", for ", record.seconds, " s");
  }
  return c10::str(record.state == State::kDone     ? "last did "
                  : record.state == State::kFailed ? "failed in "
                                                   : "was refused ",
                  what, ", ", record.seconds_ago - record.seconds, " s ago");
}

// The letter of /proc/<pid>/stat: R, S, T ...; nothing where there is none.
std::optional<char> process_state(int64_t pid) {
  std::ifstream file(c10::str("/proc/", pid, "/stat"));
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  // The name, in brackets, may hold anything.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) {
    return std::nullopt;
  }
  return text[name_end + 2];
}

// Of a process_state(): what cannot be read may be there all the same, as where
// this process has no descriptor left.
bool has_ended(int64_t pid, std::optional<char> state) {
  if (state) return *state == 'Z' || *state == 'X';
  return ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
}

std::string text_of(const Whereabouts& where) {
  return c10::str(" (pid ", where.pid, " on ", where.host, ")");
}

std::string silence_of(int64_t rank,
                       const std::map<int64_t, Whereabouts>& whereabouts) {
  const auto found = whereabouts.find(rank);
  if (found == whereabouts.end()) return "does not answer";
  const Whereabouts& where = found->second;
  if (where.space != process_space()) {
    return "does not answer" + text_of(where) + ": dead, stopped or cut off";
  }
  return fate_of(where).value_or("does not answer" + text_of(where));
}

const GroupReport* group_in(const RankReport& report,
                            const GroupReport& group) {
  for (const GroupReport& own : report.groups) {
    if (own.name == group.name && own.ranks == group.ranks) return &own;
  }
  return nullptr;
}

// What the rank called there as number `sequence`; nullptr: nothing, or it is
// not kept any more.
const Record* record_at(const RankReport& report, const GroupReport& group,
                        uint64_t sequence) {
  const GroupReport* own = group_in(report, group);
  if (own == nullptr) return nullptr;
  for (const Record& record : own->records) {
    const bool was_called =
        record.collective && record.state != State::kRefused;
    if (was_called && record.sequence == sequence) return &record;
  }
  return nullptr;
}

// "the ranks differ: ranks 0, 2 call <this>; rank 1 calls <that>"; "" where
// those that have come to it call the same.
std::string difference_at(uint64_t sequence, const GroupReport& group,
                          const std::map<int64_t, RankReport>& reports) {
  struct Callers {
    const Record* call = nullptr;  // of the first of them
    std::vector<std::string> ranks;
  };
  std::vector<Callers> all;
  for (const int64_t rank : group.ranks) {
    const auto found = reports.find(rank);
    if (found == reports.end()) continue;
    const Record* call = record_at(found->second, group, sequence);
    if (call == nullptr) continue;
    auto same = std::ranges::find_if(all, [&](const Callers& callers) {
      return callers.call->signature == call->signature;
    });
    if (same == all.end()) same = all.insert(all.end(), {.call = call});
    same->ranks.push_back(c10::str(rank));
  }
  if (all.size() < 2) return "";
  std::vector<std::string> calls;
  for (const auto& [call, ranks] : all) {
    calls.push_back(
        c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", ranks),
                 ranks.size() == 1 ? " calls " : " call ", call->what));
  }
  return "the ranks differ: " + c10::Join("; ", calls);
}

// At the first collective that they differ at, of those that are kept.
std::string first_difference(const GroupReport& group, const Operation& failed,
                             const std::map<int64_t, RankReport>& reports) {
  std::set<uint64_t> kept;
  for (const auto& [rank, report] : reports) {
    const GroupReport* own = group_in(report, group);
    if (own == nullptr) continue;
    for (const Record& record : own->records) {
      if (record.collective && record.sequence <= failed.sequence) {
        kept.insert(record.sequence);
      }
    }
  }
  for (const uint64_t sequence : kept) {
    std::string difference = difference_at(sequence, group, reports);
    if (!difference.empty()) return difference;
  }
  return "";
}

// What the rank stands still in on this group: the first that is not done, for
// messages may be called out of order. nullptr: it waits for nobody there.
const Record* wait_in(const GroupReport& group) {
  for (const State state : {State::kPending, State::kFailed}) {
    for (const Record& record : group.records) {
      if (record.state == state) return &record;
    }
  }
  return nullptr;
}

// Of a rank that waits for nobody: "; it stands in read, called by ...". The
// innermost functions, but for those that only call others.
std::string stand_of(const RankReport& report) {
  std::vector<std::string> named;
  for (const std::string& each : report.stack) {
    if (each.starts_with("std::") || each.find("+0x") != each.npos) continue;
    if (!named.empty() && named.back() == each) continue;
    named.push_back(each);
    if (named.size() == kFramesNamed) break;
  }
  return named.empty() ? ""
                       : "; it stands in " + c10::Join(", called by ", named);
}

std::string absence_of(const RankReport& report, const GroupReport& group) {
  const GroupReport* own = group_in(report, group);
  if (own == nullptr) return "has not made this group" + stand_of(report);
  const Record* own_wait = wait_in(*own);
  bool waits = own_wait != nullptr;
  std::string text = own->records.empty()
                         ? "has called nothing on it yet"
                         : last_of(waits ? *own_wait : own->records.back());
  // It may be busy in another group.
  for (const GroupReport& other : report.groups) {
    const Record* wait = &other == own ? nullptr : wait_in(other);
    if (wait == nullptr) continue;
    waits = true;
    text += c10::str("; on group '", other.name, "' it ", last_of(*wait));
  }
  return waits ? text : text + stand_of(report);
}

}  // namespace

std::string to_json(const RankReport& report) {
  json groups = json::array();
  for (const GroupReport& group : report.groups) {
    json records = json::array();
    for (const Record& record : group.records) {
      records.push_back(json_of(record));
    }
    groups.push_back({{"name", group.name},
                      {"ranks", group.ranks},
                      {"operations", std::move(records)}});
  }
  json all = {{"rank", report.rank}, {"groups", std::move(groups)}};
  if (!report.stack.empty()) all["stack"] = report.stack;
  return all.dump();
}

std::optional<RankReport> report_of_json(const std::string& text) {
  try {
    const json all = json::parse(text);
    RankReport report{.rank = all.at("rank"),
                      .groups = {},
                      .stack = all.value("stack", std::vector<std::string>())};
    for (const json& group : all.at("groups")) {
      GroupReport one{
          .name = group.at("name"), .ranks = group.at("ranks"), .records = {}};
      for (const json& record : group.at("operations")) {
        one.records.push_back(record_of(record));
      }
      report.groups.push_back(std::move(one));
    }
    return report;
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

std::vector<int64_t> awaited_by(const RankReport& report) {
  std::set<int64_t> ranks;
  for (const GroupReport& group : report.groups) {
    if (wait_in(group) == nullptr) continue;
    ranks.insert(group.ranks.begin(), group.ranks.end());
  }
  ranks.erase(report.rank);
  return {ranks.begin(), ranks.end()};
}

bool is_stopped(const Whereabouts& where) {
  return process_state(where.pid) == 'T';
}

bool is_gone(const Whereabouts& where) {
  return has_ended(where.pid, process_state(where.pid));
}

std::optional<std::string> fate_of(const Whereabouts& where) {
  if (where.space != process_space()) return std::nullopt;
  const auto state = process_state(where.pid);
  if (has_ended(where.pid, state)) return "has died" + text_of(where);
  if (state == 'T' || state == 't') {
    return "is stopped" + text_of(where) + ", by a signal or a debugger";
  }
  return std::nullopt;
}

std::string verdict_on(const Question& question,
                       const std::map<int64_t, RankReport>& reports,
                       const std::map<int64_t, Whereabouts>& whereabouts) {
  const GroupReport& group = question.group;
  const Operation& failed = question.failed;
  if (question.ranks_differ) return first_difference(group, failed, reports);
  const bool is_message = is_point_to_point(failed.verb);
  std::vector<std::string> parts;
  if (!is_message) {
    const std::string here = difference_at(failed.sequence, group, reports);
    if (!here.empty()) parts.push_back(here);
  }
  bool all_answer = true;
  for (const int64_t rank : group.ranks) {
    const auto found = reports.find(rank);
    if (found == reports.end()) {
      all_answer = false;
      parts.push_back(
          c10::str("rank ", rank, ' ', silence_of(rank, whereabouts)));
    } else if (!is_message &&
               record_at(found->second, group, failed.sequence) == nullptr) {
      parts.push_back(c10::str("rank ", rank, " has not come to it: it ",
                               absence_of(found->second, group)));
    }
  }
  const auto peer = reports.find(failed.peer);
  if (is_message && all_answer && peer != reports.end()) {
    parts.push_back(
        c10::str("rank ", failed.peer, ' ', absence_of(peer->second, group)));
  }
  for (const auto& [rank, where] : whereabouts) {
    if (reports.contains(rank) || std::ranges::count(group.ranks, rank) > 0) {
      continue;
    }
    parts.push_back(c10::str("behind that, rank ", rank, ' ',
                             silence_of(rank, whereabouts)));
  }
  return c10::Join("; ", parts);
}

}  // namespace tessera::comm
