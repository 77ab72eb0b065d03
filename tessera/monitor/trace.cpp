#include "tessera/monitor/trace.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/monitor/detail/json_text.h"

namespace tessera::monitor {
namespace {

using detail::JsonText;

constexpr std::string_view kHead =
    "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
constexpr std::string_view kTail = "\n]}\n";

std::string rank_path(const std::string& folder, int64_t rank) {
  return folder + "/rank-" + std::to_string(rank) + ".json";
}

// Microseconds, as the format has them, of whole nanoseconds: what lies inside
// of another span lies there when it is read, too.
double micros(int64_t nanos) { return static_cast<double>(nanos) / 1e3; }

int64_t nanos(double seconds) { return std::llround(seconds * 1e9); }

JsonText event_at(const char* phase, const std::string& name, SpanKind kind,
                  int64_t rank, int64_t lane, int64_t at) {
  JsonText event;
  event.text("ph", phase)
      .text("name", name)
      .text("cat", name_of(kind))
      .number("pid", rank)
      .number("tid", lane)
      .number("ts", micros(at));
  return event;
}

std::string slice_of(const Span& span, int64_t rank) {
  const int64_t begin = nanos(span.begin_s), end = nanos(span.end_s);
  JsonText args;
  if (span.kind == SpanKind::kWait) args.text("for", name_of(span.awaited));
  for (const auto& [name, value] : span.args) args.number(name, value);
  return event_at("X", span.name, span.kind, rank, span.lane, begin)
      .number("dur", micros(end - begin))
      .object("args", args)
      .str();
}

// It is tied to the slice around its time: the arrow starts where the sender's
// slice does, and ends just before the end of the receiver's.
std::string arrow_of(const Span& span, int64_t rank) {
  const int64_t begin = nanos(span.begin_s), end = nanos(span.end_s);
  const int64_t at = span.starts_flow ? begin : std::max(begin, end - 1);
  auto event = event_at(span.starts_flow ? "s" : "f", "message",
                        SpanKind::kMessage, rank, span.lane, at);
  event.text("id", "0x" + to_hex(*span.flow));
  if (!span.starts_flow) event.text("bp", "e");
  return event.str();
}

std::string name_event(const char* what, int64_t rank, int64_t lane,
                       const std::string& name) {
  return JsonText()
      .text("ph", "M")
      .text("name", what)
      .number("pid", rank)
      .number("tid", lane)
      .object("args", JsonText().text("name", name))
      .str();
}

std::string order_event(const char* what, int64_t rank, int64_t lane,
                        int64_t place) {
  return JsonText()
      .text("ph", "M")
      .text("name", what)
      .number("pid", rank)
      .number("tid", lane)
      .object("args", JsonText().number("sort_index", place))
      .str();
}

}  // namespace

TraceWriter::TraceWriter(const std::string& folder, int64_t rank,
                         const std::string& coordinates,
                         const std::vector<std::string>& lanes, double ahead_s,
                         int64_t max_bytes)
    : path_(rank_path(folder, rank)),
      rank_(rank),
      num_lanes_(std::ssize(lanes)),
      ahead_s_(ahead_s),
      max_bytes_(max_bytes) {
  std::string name = "rank " + std::to_string(rank);
  if (!coordinates.empty()) name += " " + coordinates;
  add_event(name_event("process_name", rank, 0, name));
  add_event(order_event("process_sort_index", rank, 0, rank));
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    add_event(name_event("thread_name", rank, lane, lanes[lane]));
    add_event(order_event("thread_sort_index", rank, lane, lane));
  }
}

void TraceWriter::add(const std::vector<Span>& spans) {
  if (std::ssize(events_) >= max_bytes_) {
    if (!std::exchange(is_full_, true)) {
      log::warning("the trace of rank ", rank_, " is full, with ",
                   bytes_text(max_bytes_),
                   ": later steps are not in it. A smaller monitor.trace ends "
                   "before.");
    }
    return;
  }
  parents_of(spans);  // refuses what cannot be drawn
  for (Span span : spans) {
    span.begin_s += ahead_s_;
    span.end_s += ahead_s_;
    TS_CHECK(span.lane >= 0 && span.lane < num_lanes_, "monitor: span '",
             span.name, "' is on lane ", span.lane, " of ", num_lanes_, ".");
    add_event(slice_of(span, rank_));
    if (span.flow) add_event(arrow_of(span, rank_));
  }
}

void TraceWriter::add_event(const std::string& event) {
  if (!events_.empty()) events_ += ",\n";
  events_ += event;
}

void TraceWriter::write() const {
  write_file_atomic(path_, std::string(kHead) + events_ + std::string(kTail));
}

void merge_traces(const std::string& folder, int64_t world_size) {
  std::string whole(kHead);
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const std::string path = rank_path(folder, rank);
    const std::string text = read_file(path);
    TS_CHECK_IO(text.starts_with(kHead) && text.ends_with(kTail), path,
                ": this is no trace of a rank.");
    if (rank > 0) whole += ",\n";
    whole.append(text, kHead.size(), text.size() - kHead.size() - kTail.size());
  }
  write_file_atomic(folder + "/trace.json", whole + std::string(kTail));
  std::error_code none;
  while (std::filesystem::remove(rank_path(folder, world_size), none)) {
    ++world_size;
  }
}

}  // namespace tessera::monitor
