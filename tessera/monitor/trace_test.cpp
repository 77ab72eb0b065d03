#include "tessera/monitor/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::monitor {
namespace {

using tessera::detail::Json;
using tessera::detail::parse_json;
using ::testing::HasSubstr;
using testing::ThrowsMessage;

// An uptime with which microseconds have no room left for small numbers in
// single precision.
constexpr double kStart = 1234567.0;

Span span_at(const std::string& name, SpanKind kind, int64_t lane, double begin,
             double end) {
  Span span;
  span.name = name;
  span.kind = kind;
  span.lane = lane;
  span.begin_s = kStart + begin;
  span.end_s = kStart + end;
  return span;
}

Json events_in(const std::string& path) {
  return parse_json(read_file(path), path)["traceEvents"];
}

std::vector<Json> events_of(const Json& events, const std::string& phase) {
  std::vector<Json> found;
  for (const Json& event : events) {
    if (event["ph"] == phase) found.push_back(event);
  }
  return found;
}

// Two stages of a pipeline: rank 0 sends what rank 1 waits for.
void write_two_ranks(const std::string& folder) {
  const uint64_t message = flow_id(2, 0, 1, 0);
  TraceWriter first(folder, 0, "pp=0", {"compute", "messages"});
  Span send = span_at("send", SpanKind::kMessage, 1, 0.010, 0.013);
  send.flow = message;
  send.starts_flow = true;
  send.args = {{"microbatch", 1}, {"bytes", 4096}};
  first.add({span_at("forward", SpanKind::kForward, 0, 0.001, 0.010), send});
  first.write();

  TraceWriter second(folder, 1, "pp=1", {"compute", "messages"});
  Span receive = span_at("receive", SpanKind::kMessage, 1, 0.002, 0.013);
  receive.flow = message;
  Span wait = span_at("wait", SpanKind::kWait, 0, 0.003, 0.0131);
  wait.awaited = SpanKind::kMessage;
  second.add({receive, wait});
  second.add({span_at("backward", SpanKind::kBackward, 0, 0.014, 0.020),
              span_at("recompute", SpanKind::kRecompute, 0, 0.014, 0.016)});
  second.write();
}

TEST(Trace, IsAProcessForEachRankAndATrackForEachLane) {
  const TemporaryFolder folder;
  write_two_ranks(folder.path());
  merge_traces(folder.path(), 2);
  const Json events = events_in(folder.file("trace.json"));
  std::map<std::string, std::string> names;  // by event, process and track
  for (const Json& event : events_of(events, "M")) {
    if (!event["args"].contains("name")) continue;
    names[event["name"].get<std::string>() + event["pid"].dump() +
          event["tid"].dump()] = event["args"]["name"];
  }
  EXPECT_EQ(names["process_name00"], "rank 0 pp=0");
  EXPECT_EQ(names["process_name10"], "rank 1 pp=1");
  EXPECT_EQ(names["thread_name00"], "compute");
  EXPECT_EQ(names["thread_name11"], "messages");
  EXPECT_EQ(events.size(), events_in(folder.file("rank-0.json")).size() +
                               events_in(folder.file("rank-1.json")).size());
}

TEST(Trace, SlicesSayWhatWhenAndHowMuch) {
  const TemporaryFolder folder;
  write_two_ranks(folder.path());
  const auto slices = events_of(events_in(folder.file("rank-0.json")), "X");
  ASSERT_EQ(slices.size(), 2);
  EXPECT_EQ(slices[0]["name"], "forward");
  EXPECT_EQ(slices[0]["cat"], "forward");
  EXPECT_NEAR(slices[0]["ts"].get<double>(), (kStart + 0.001) * 1e6, 1e-3);
  EXPECT_NEAR(slices[0]["dur"].get<double>(), 9000.0, 2e-3);
  EXPECT_EQ(slices[1]["tid"], 1);
  EXPECT_EQ(slices[1]["args"]["bytes"], 4096);
  EXPECT_EQ(slices[1]["args"]["microbatch"], 1);
  const auto others = events_of(events_in(folder.file("rank-1.json")), "X");
  EXPECT_EQ(others[1]["args"]["for"], "message");
}

// As Perfetto reads them: to whole nanoseconds.
TEST(Trace, SlicesOfATrackNeverOverlapInPart) {
  const TemporaryFolder folder;
  TraceWriter trace(folder.path(), 0, "", {"compute"});
  std::vector<Span> spans;
  // Each begins where the one before ends, and has one of its length in it.
  for (int i = 0; i < 2000; ++i) {
    const double begin = i * 1.0e-7 / 3, end = (i + 1) * 1.0e-7 / 3;
    spans.push_back(span_at("backward", SpanKind::kBackward, 0, begin, end));
    spans.push_back(span_at("recompute", SpanKind::kRecompute, 0, begin, end));
  }
  trace.add(spans);
  trace.write();
  int64_t last = 0;
  const auto slices = events_of(events_in(folder.file("rank-0.json")), "X");
  for (size_t i = 0; i < slices.size(); i += 2) {
    const auto nanos = [&](size_t of, const char* key) {
      return std::llround(slices[of][key].get<double>() * 1e3);
    };
    EXPECT_EQ(nanos(i, "ts"), nanos(i + 1, "ts"));
    EXPECT_EQ(nanos(i, "dur"), nanos(i + 1, "dur"));
    EXPECT_GE(nanos(i, "ts"), last);
    last = nanos(i, "ts") + nanos(i, "dur");
  }
}

TEST(Trace, AMessageIsAnArrowFromSliceToSlice) {
  const TemporaryFolder folder;
  write_two_ranks(folder.path());
  merge_traces(folder.path(), 2);
  const Json events = events_in(folder.file("trace.json"));
  const auto starts = events_of(events, "s"), ends = events_of(events, "f");
  ASSERT_EQ(starts.size(), 1);
  ASSERT_EQ(ends.size(), 1);
  EXPECT_EQ(starts[0]["id"], ends[0]["id"]);
  EXPECT_EQ(ends[0]["bp"], "e");
  EXPECT_LT(starts[0]["ts"].get<double>(), ends[0]["ts"].get<double>());
  for (const Json& arrow : {starts[0], ends[0]}) {
    int around = 0;
    for (const Json& slice : events_of(events, "X")) {
      const double ts = slice["ts"], dur = slice["dur"], at = arrow["ts"];
      around += slice["pid"] == arrow["pid"] && slice["tid"] == arrow["tid"] &&
                ts <= at && at < ts + dur;
    }
    EXPECT_EQ(around, 1);
  }
}

TEST(Trace, FlowsDifferByStepPlaceAndNumber) {
  EXPECT_EQ(flow_id(1, 2, 3, 4), flow_id(1, 2, 3, 4));
  std::map<uint64_t, int> seen;
  for (int64_t step = 0; step < 4; ++step) {
    for (int64_t from = 0; from < 4; ++from) {
      for (int64_t to = 0; to < 4; ++to) {
        for (int64_t i = 0; i < 4; ++i) ++seen[flow_id(step, from, to, i)];
      }
    }
  }
  EXPECT_EQ(seen.size(), 256);
}

TEST(Trace, WhatCannotBeDrawnIsRefused) {
  const TemporaryFolder folder;
  TraceWriter trace(folder.path(), 0, "", {"compute"});
  const auto adding = [&](const std::vector<Span>& spans) {
    return [&trace, spans] { trace.add(spans); };
  };
  EXPECT_THAT(adding({span_at("a", SpanKind::kForward, 0, 0, 2),
                      span_at("b", SpanKind::kForward, 0, 1, 3)}),
              ThrowsMessage<Error>(HasSubstr("'b' begins in 'a' and ends")));
  EXPECT_THAT(adding({span_at("a", SpanKind::kForward, 0, 2, 1)}),
              ThrowsMessage<Error>(HasSubstr("ends before it begins")));
  EXPECT_THAT(adding({span_at("a", SpanKind::kForward, 1, 1, 2)}),
              ThrowsMessage<Error>(HasSubstr("on lane 1 of 1")));
}

TEST(Trace, FilesThatAreMissingOrBrokenAreNamed) {
  const TemporaryFolder folder;
  write_two_ranks(folder.path());
  EXPECT_THAT([&] { merge_traces(folder.path(), 3); },
              ThrowsMessage<Error>(HasSubstr("rank-2.json")));
  write_file_atomic(folder.file("rank-2.json"), "{}");
  EXPECT_THAT([&] { merge_traces(folder.path(), 3); },
              ThrowsMessage<Error>(HasSubstr("this is no trace of a rank")));
  EXPECT_FALSE(std::filesystem::exists(folder.file("trace.json")));
  merge_traces(folder.path(), 2);  // of a run on fewer ranks than the last one
  EXPECT_FALSE(std::filesystem::exists(folder.file("rank-2.json")));
  write_file_atomic(folder.file("file"), "");
  const TraceWriter nowhere(folder.file("file"), 0, "", {"compute"});
  EXPECT_THROW(nowhere.write(), Error);
}

// A run of many steps is not held up, and its memory stays bounded.
TEST(Trace, LaterStepsAreLeftOutOfOneThatIsFull) {
  const TemporaryFolder folder;
  TraceWriter trace(folder.path().string(), 0, "", {"compute"}, /*ahead_s=*/0,
                    /*max_bytes=*/1000);
  for (int i = 0; i < 100; ++i) {
    trace.add({span_at("forward", SpanKind::kForward, 0, i, i + 0.5)});
  }
  trace.write();
  const auto slices = events_of(events_in(folder.file("rank-0.json")), "X");
  EXPECT_GE(slices.size(), 2U);
  EXPECT_LT(slices.size(), 10U);
}

}  // namespace
}  // namespace tessera::monitor
