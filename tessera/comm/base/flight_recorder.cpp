#include "tessera/comm/base/flight_recorder.h"

#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <span>
#include <sstream>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"

namespace tessera::comm {

double Operation::seconds_so_far() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun)
      .count();
}

std::string Operation::describe() const {
  std::ostringstream text;
  text << name_of(verb);
  if (reduces(verb)) text << '(' << name_of(op) << ')';
  text << " #" << sequence;
  if (verb == Verb::kBarrier) return text.str();
  if (peer >= 0)
    text << (verb == Verb::kSend ? " to" : " from") << " rank " << peer;
  if (is_point_to_point(verb)) text << " tag " << tag;
  text << ' ' << c10::getDtypeNames(dtype).first << '[';
  for (size_t d = 0; d < shape.size(); ++d) text << (d ? ", " : "") << shape[d];
  text << ']';
  return text.str();
}

uint64_t Operation::signature(uint64_t before) const {
  const bool has_sizes_of_its_own = verb == Verb::kAllToAll;
  const std::array<int64_t, 5> parts = {
      static_cast<int64_t>(verb), reduces(verb) ? static_cast<int64_t>(op) : 0,
      static_cast<int64_t>(dtype), peer,
      has_sizes_of_its_own ? 0 : c10::multiply_integers(shape)};
  return hash64(std::as_bytes(std::span(parts)), before);
}

uint64_t FlightRecorder::begin(Operation& operation) {
  std::lock_guard lock(mutex_);
  operation.sequence =
      is_point_to_point(operation.verb) ? ++messages_ : ++collectives_;
  operation.begun = std::chrono::steady_clock::now();
  operation.step = rank_context().step;
  operation.doing = rank_context().doing;
  const uint64_t ticket = tickets_++;
  if (entries_.size() < kEntries) {
    entries_.emplace_back();
  } else {
    leave(entries_[ticket % kEntries]);
  }
  if (busy_) busy_->begin();
  entries_[ticket % kEntries] = {.operation = operation, .ticket = ticket};
  return ticket;
}

void FlightRecorder::end(uint64_t ticket, bool failed,
                         std::optional<double> seconds) {
  std::lock_guard lock(mutex_);
  Entry& entry = entries_[ticket % kEntries];
  if (entry.ticket != ticket || entry.state != State::kPending) return;
  leave(entry);
  entry.state = failed ? State::kFailed : State::kDone;
  entry.seconds = seconds ? *seconds : entry.operation.seconds_so_far();
  VerbStats& sum = stats_[static_cast<size_t>(entry.operation.verb)];
  sum.calls += 1;
  sum.bytes += entry.operation.bytes;
  sum.seconds += entry.seconds;
}

void FlightRecorder::take_back(uint64_t ticket) {
  std::lock_guard lock(mutex_);
  Entry& entry = entries_[ticket % kEntries];
  if (entry.ticket != ticket) return;
  leave(entry);
  entry.state = State::kRefused;
  entry.seconds = entry.operation.seconds_so_far();
  --(is_point_to_point(entry.operation.verb) ? messages_ : collectives_);
}

std::vector<VerbStats> FlightRecorder::stats() const {
  std::lock_guard lock(mutex_);
  std::vector<VerbStats> called;
  for (int v = 0; v < kNumVerbs; ++v) {
    if (stats_[v].calls == 0) continue;
    called.push_back(stats_[v]);
    called.back().verb = name_of(static_cast<Verb>(v));
  }
  return called;
}

void FlightRecorder::reset_stats() {
  std::lock_guard lock(mutex_);
  stats_ = {};
}

std::string FlightRecorder::text() const {
  std::string lines;
  for (const Record& record : records()) {
    const char* state = record.state == State::kPending  ? " pending for "
                        : record.state == State::kDone   ? " done in "
                        : record.state == State::kFailed ? " failed after "
                                                         : " refused after ";
    lines += c10::str(record.what, state, record.seconds, " s\n");
  }
  return lines;
}

std::vector<FlightRecorder::Record> FlightRecorder::records(size_t most) const {
  std::lock_guard lock(mutex_);
  std::vector<Record> last;
  const uint64_t kept = std::min<uint64_t>({tickets_, kEntries, most});
  for (uint64_t t = tickets_ - kept; t < tickets_; ++t) {
    const Entry& entry = entries_[t % kEntries];
    const Operation& operation = entry.operation;
    const double since = operation.seconds_so_far();
    last.push_back(
        {.sequence = operation.sequence,
         .collective = !is_point_to_point(operation.verb),
         .what = operation.describe(),
         .signature = to_hex(operation.signature()),
         .state = entry.state,
         .seconds = entry.state == State::kPending ? since : entry.seconds,
         .seconds_ago = since,
         .step = operation.step,
         .doing = operation.doing});
  }
  return last;
}

}  // namespace tessera::comm
