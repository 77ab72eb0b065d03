#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "tessera/core/crc32c.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/monitor/console.h"
#include "tessera/monitor/json_lines.h"
#include "tessera/monitor/links.h"
#include "tessera/monitor/sink.h"
#include "tessera/monitor/summary.h"
#include "tessera/monitor/tensorboard.h"

namespace tessera::monitor {
namespace {

using tessera::detail::Json;
using tessera::detail::parse_json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

StepRecord record_of(int64_t step) {
  StepRecord record;
  record.step = step;
  record.loss = 7.612341234;
  record.grad_norm = 1.23451;
  record.lr = 3e-4;
  record.tokens = 4096;
  record.step_s = 0.25;
  record.tokens_per_s = 24690;
  record.mem_peak_mib = 532.48;
  return record;
}

RunInfo info_in(const std::string& folder, int64_t first_step = 0) {
  RunInfo info;
  info.name = "test";
  info.folder = folder;
  info.first_step = first_step;
  info.total_steps = 1000;
  info.world_size = 2;
  info.host_memory_mib = 24576;
  return info;
}

std::vector<Json> lines_of(const std::string& path) {
  std::vector<Json> lines;
  std::istringstream text(read_file(path));
  for (std::string line; std::getline(text, line);) {
    lines.push_back(parse_json(line, path));
  }
  return lines;
}

std::vector<int64_t> steps_in(const std::string& path) {
  std::vector<int64_t> steps;
  for (const Json& line : lines_of(path)) steps.push_back(line["step"]);
  return steps;
}

void append(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::app) << text;
}

TEST(JsonLines, NumbersReadBackToTheSameValue) {
  for (double value : {0.1, 1.0 / 3, 1e-310, 5e300, 123456789.123456789, 2.0,
                       -0.0, std::numeric_limits<double>::max()}) {
    StepRecord record = record_of(1);
    record.loss = value;
    record.bubble = -value;
    record.expert_load = {value, 1};
    const Json line = parse_json(to_json_line(record), "line");
    EXPECT_EQ(line["loss"].get<double>(), value);
    EXPECT_EQ(line["bubble"].get<double>(), -value);
    EXPECT_EQ(line["expert_load"][0].get<double>(), value);
  }
}

TEST(JsonLines, HasTheFieldsOfTheContractInOrder) {
  std::vector<std::string> names;
  const Json line = parse_json(to_json_line(record_of(1)), "line");
  for (const auto& [name, value] : line.items()) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("step", "loss", "grad_norm", "lr", "tokens",
                                 "step_s", "tokens_per_s", "tflops", "mfu",
                                 "mem_peak_mib", "comm_s", "comm_bytes",
                                 "comm_latency_us", "comm_gbps", "bubble"));
  EXPECT_TRUE(line["mfu"].is_null());

  StepRecord full = record_of(2);
  full.loss_scale = 1024;
  full.aux_loss = 0.01;
  full.exposed_comm_s = 0.125;
  full.seconds.emplace().fill(0.5);
  full.expert_load = {0.5, 0.5};
  full.validation = Validation{.loss = 6.5};
  const Json more = parse_json(to_json_line(full), "line");
  EXPECT_EQ(more["loss_scale"], 1024);
  EXPECT_EQ(more["aux_loss"], 0.01);
  EXPECT_EQ(more["exposed_comm_s"], 0.125);
  EXPECT_EQ(more["seconds"].size(), kNumSpanKinds);
  EXPECT_EQ(more["seconds"]["forward"], 0.5);
  EXPECT_EQ(more["valid_loss"], 6.5);
}

TEST(JsonLines, WhatIsNoNumberIsNull) {
  StepRecord record = record_of(1);
  record.loss = std::nan("");
  record.grad_norm = std::numeric_limits<double>::infinity();
  const Json line = parse_json(to_json_line(record), "line");
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
}

// As on a full disk: what cannot be written waits for room.
TEST(JsonLines, ALineThatDoesNotFitComesWhenThereIsRoom) {
  const TemporaryFolder folder;
  const std::string path = folder.file("metrics.jsonl");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto limit_to = [&](rlim_t bytes) {
    const rlimit limit{bytes, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  };
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  {
    JsonLines sink(path);
    sink.step(record_of(1));
    limit_to(std::filesystem::file_size(path) + 10);
    sink.step(record_of(2));
    sink.step(record_of(3));
    EXPECT_THAT(steps_in(path), ElementsAre(1));
    EXPECT_THROW(sink.close({}), Error);
    limit_to(before.rlim_cur);
    sink.step(record_of(4));
    sink.close({});
  }
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(steps_in(path), ElementsAre(1, 2, 3, 4));
}

TEST(JsonLines, APipeIsRefusedAndNotWaitedFor) {
  const TemporaryFolder folder;
  const std::string path = folder.file("metrics.jsonl");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THROW(truncate_after(path, 3), Error);
  EXPECT_THROW(JsonLines sink(path), Error);
}

TEST(JsonLines, TheLastLineIsAWholeOne) {
  const TemporaryFolder folder;
  const std::string path = folder.file("metrics.jsonl");
  EXPECT_EQ(last_line_of(path), "");  // no file yet
  append(path, "{\"step\":1");
  EXPECT_EQ(last_line_of(path), "");
  append(path, ",\"loss\":2}\n{\"step\":2,");
  EXPECT_EQ(last_line_of(path), "{\"step\":1,\"loss\":2}");
  append(path, std::string(3 << 20, ' ') + "}\nlast\n");
  EXPECT_EQ(last_line_of(path), "last");
  const std::string longer(3 << 20, 'a');
  append(path, longer + "\n{\"torn");
  EXPECT_EQ(last_line_of(path), longer);
}

TEST(JsonLines, AResumedRunHasEachStepOnce) {
  const TemporaryFolder folder;
  const std::string path = folder.file("metrics.jsonl");
  truncate_after(path, 3);  // no file yet
  {
    JsonLines sink(path);
    for (int64_t step = 1; step <= 5; ++step) sink.step(record_of(step));
  }
  truncate_after(path, 9);
  EXPECT_THAT(steps_in(path), ElementsAre(1, 2, 3, 4, 5));
  truncate_after(path, 3);
  JsonLines sink(path);
  sink.step(record_of(4));
  sink.close({});
  EXPECT_THAT(steps_in(path), ElementsAre(1, 2, 3, 4));
  truncate_after(path, 0);
  EXPECT_THAT(read_file(path), IsEmpty());
}

TEST(SampleLines, AreTextsOfTheirSteps) {
  const TemporaryFolder folder;
  const std::string path = folder.file("samples.jsonl");
  SampleLines sink(path);
  sink.step(record_of(1));
  StepRecord record = record_of(2);
  record.sample = Sample{
      .prompt = "a \"b\"", .text = "\n\u00fc", .tokens = 3, .seconds = 0.5};
  sink.step(record);
  sink.close({});
  const auto lines = lines_of(path);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_EQ(lines[0], parse_json(R"({"step": 2, "prompt": "a \"b\"",
      "text": "\n\u00fc", "tokens": 3, "seconds": 0.5})",
                                 "expected"));
  EXPECT_EQ(parse_json(to_json_line(record), "line")["sample_s"], 0.5);
  truncate_after(path, 1);
  EXPECT_THAT(read_file(path), IsEmpty());
}

TEST(JsonLines, ATornOrStrangeLineEndsTheGoodPart) {
  for (const char* bad :
       {"{\"step\":3,\"loss\":1.5", "{\"step\":3,\"loss\":1.5}", "}\n", "\n",
        "{\"step\":x,}\n", "{\"step\":3}\n"}) {
    const TemporaryFolder folder;
    const std::string path = folder.file("metrics.jsonl");
    {
      JsonLines sink(path);
      sink.step(record_of(1));
      sink.step(record_of(2));
    }
    append(path, bad);
    truncate_after(path, 100);
    EXPECT_THAT(steps_in(path), ElementsAre(1, 2)) << bad;
  }
}

TEST(JsonLines, WhatFollowsADamagedLineStays) {
  const TemporaryFolder folder;
  const std::string path = folder.file("metrics.jsonl");
  {
    JsonLines(path).step(record_of(1));
  }
  append(path, "garbage\n\n");
  {
    JsonLines sink(path);
    for (int64_t step = 2; step <= 5; ++step) sink.step(record_of(step));
  }
  append(path, "more of it\n");
  truncate_after(path, 4);
  EXPECT_THAT(steps_in(path), ElementsAre(1, 2, 3, 4));
}

TEST(JsonLines, AKilledRunLeavesWholeLines) {
  const TemporaryFolder folder;
  const std::string path = folder.file("metrics.jsonl");
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    JsonLines sink(path);
    for (int64_t step = 1;; ++step) {
      sink.step(record_of(step));
      if (step == 200 && write(ends[1], "x", 1) != 1) _exit(1);
    }
  }
  char byte = 0;
  ASSERT_EQ(read(ends[0], &byte, 1), 1);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ends[0]);
  close(ends[1]);
  // The kernel may have cut the last line off between two pages.
  truncate_after(path, std::numeric_limits<int64_t>::max());
  const auto steps = steps_in(path);
  EXPECT_GE(steps.size(), 200);
  EXPECT_EQ(steps.back(), static_cast<int64_t>(steps.size()));
}

TEST(JsonLines, NamesTheFileThatItCannotWrite) {
  try {
    JsonLines sink("/proc/no-such-folder/metrics.jsonl");
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kInputOutput);
    EXPECT_THAT(error.what(), HasSubstr("/proc/no-such-folder"));
  }
  // What is no file may block, or swallow the lines.
  EXPECT_THROW(JsonLines full("/dev/full"), Error);
}

// Takes the records of an events file apart, checking both sums of each.
std::vector<std::string> events_in(const std::string& path) {
  const std::string bytes = read_file(path);
  auto sum_at = [&](size_t at) {
    uint32_t sum = 0;
    std::memcpy(&sum, bytes.data() + at, sizeof sum);
    sum -= 0xa282ead8U;
    return sum >> 17 | sum << 15;
  };
  auto crc_of = [&](size_t at, size_t size) {
    return crc32c(std::as_bytes(std::span(bytes).subspan(at, size)));
  };
  std::vector<std::string> events;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t size = 0;
    std::memcpy(&size, bytes.data() + at, sizeof size);
    EXPECT_EQ(sum_at(at + 8), crc_of(at, 8));
    EXPECT_EQ(sum_at(at + 12 + size), crc_of(at + 12, size));
    events.push_back(bytes.substr(at + 12, size));
    at += 16 + size;
  }
  return events;
}

TEST(TensorBoard, WritesARecordForEachStep) {
  const TemporaryFolder folder;
  TensorBoard sink(info_in(folder.path()));
  EXPECT_THAT(sink.path(), HasSubstr("/events.out.tfevents."));
  sink.step(record_of(1));
  StepRecord second = record_of(2);
  second.validation = Validation{.loss = 6.5};
  second.mfu = 0.25;
  sink.step(second);
  const auto events = events_in(sink.path());  // flushed at every step
  ASSERT_EQ(events.size(), 3);
  EXPECT_THAT(events[0], HasSubstr("brain.Event:2"));
  EXPECT_THAT(events[1], HasSubstr("loss_metrics/global_avg_loss"));
  EXPECT_THAT(events[1], Not(HasSubstr("mfu(%)")));
  EXPECT_THAT(events[2], HasSubstr("mfu(%)"));
  EXPECT_THAT(events[2], HasSubstr("validation_metrics/loss"));
  sink.close({});
}

TEST(TensorBoard, ManyLinksHaveTwoNames) {
  StepRecord record = record_of(1);
  record.links = {{.from = 0, .to = 1, .gbps = 3},
                  {.from = 2, .to = 3, .gbps = 1},
                  {.from = 4, .to = 5, .gbps = 2}};
  const auto event_of = [&](int64_t world_size) {
    const TemporaryFolder folder;
    RunInfo info = info_in(folder.path());
    info.world_size = world_size;
    TensorBoard sink(info);
    sink.step(record);
    return events_in(sink.path()).at(1);
  };
  EXPECT_THAT(event_of(11), HasSubstr("links/2-3/bandwidth(GB/s)"));
  const std::string many = event_of(12);
  EXPECT_THAT(many, HasSubstr("links/slowest/bandwidth(GB/s)"));
  EXPECT_THAT(many, HasSubstr("links/median/latency(us)"));
  EXPECT_THAT(many, Not(HasSubstr("links/2-3")));
}

TEST(Links, OfManyTheSlowestAndTheMedianAreShown) {
  std::vector<LinkSpeed> links;
  for (int64_t i = 0; i < 64; ++i) {
    links.push_back({.to = i, .gbps = static_cast<double>(64 - i)});
  }
  EXPECT_EQ(slowest_and_median(links)[0].gbps, 64);  // as they are
  for (int64_t i = 64; i < 1001; ++i) {
    links.push_back({.to = i, .gbps = static_cast<double>(i + 1)});
  }
  const auto shown = slowest_and_median(links);
  ASSERT_EQ(shown.size(), 65U);
  EXPECT_EQ(shown[0].gbps, 1);
  EXPECT_EQ(shown[63].gbps, 64);
  EXPECT_EQ(shown[64].gbps, 501);
}

TEST(TensorBoard, EachStartHasAFileOfItsOwn) {
  const TemporaryFolder folder;
  const TensorBoard first(info_in(folder.path()));
  const TensorBoard resumed(info_in(folder.path(), 5));
  EXPECT_NE(first.path(), resumed.path());
  EXPECT_EQ(events_in(first.path()).size(), 1);
  EXPECT_EQ(events_in(resumed.path()).size(), 2);  // and the note to forget
  // One that begins anew forgets all that lies there.
  const TensorBoard anew(info_in(folder.path()));
  EXPECT_EQ(events_in(anew.path()).size(), 2);
}

TEST(Summary, TellsHowTheRunWent) {
  const TemporaryFolder folder;
  Summary sink(info_in(folder.path(), 10));
  for (int64_t step = 11; step <= 14; ++step) {
    StepRecord record = record_of(step);
    record.loss = 20.0 - static_cast<double>(step);
    record.mem_peak_mib = step == 12 ? 900 : 500;
    record.was_skipped = step == 12 || step == 13;
    if (step == 12) record.validation = Validation{.loss = 5.5};
    if (step == 14) record.validation = Validation{.loss = 6};
    sink.step(record);
  }
  sink.close({.reason = "failed",
              .exit_code = 1,
              .message = "a \"bad\"\nend",
              .traffic = {{.group = "dp",
                           .verb = "all_reduce",
                           .calls = 3,
                           .bytes = 4096,
                           .seconds = 0.5},
                          {.group = "tp", .verb = "barrier", .calls = 1}},
              .links = {{.from = 0, .to = 1, .latency_us = 14},
                        {.from = 0, .to = 2, .gbps = 7.5}}});
  const std::string path = folder.file("summary.json");
  const Json json = parse_json(read_file(path), path);
  EXPECT_EQ(json["reason"], "failed");
  EXPECT_EQ(json["exit_code"], 1);
  EXPECT_EQ(json["message"], "a \"bad\"\nend");
  EXPECT_EQ(json["steps"], 14);
  EXPECT_EQ(json["steps_run"], 4);
  EXPECT_EQ(json["skipped_steps"], 2);
  EXPECT_EQ(json["tokens"], 4 * 4096);
  EXPECT_EQ(json["tokens_per_s"], 4096 / 0.25);
  EXPECT_EQ(json["first_loss"], 9);
  EXPECT_EQ(json["last_loss"], 6);
  EXPECT_EQ(json["last_valid_loss"], 6);
  EXPECT_EQ(json["best_valid_loss"], 5.5);
  EXPECT_EQ(json["mem_peak_mib"], 900);
  ASSERT_EQ(json["communication"].size(), 2U);
  EXPECT_EQ(json["communication"][0]["group"], "dp");
  EXPECT_EQ(json["communication"][0]["bytes"], 4096);
  EXPECT_EQ(json["communication"][1]["verb"], "barrier");
  ASSERT_EQ(json["links"].size(), 2U);
  EXPECT_EQ(json["links"][0]["latency_us"], 14);
  EXPECT_EQ(json["links"][1]["to"], 2);
  EXPECT_EQ(json["links"][1]["gbps"], 7.5);
}

TEST(Summary, ARunWithoutAStepHasOneToo) {
  const TemporaryFolder folder;
  Summary sink(info_in(folder.path(), 10));
  sink.close({});
  const Json json = parse_json(read_file(folder.file("summary.json")), "it");
  EXPECT_EQ(json["steps"], 10);
  EXPECT_TRUE(json["last_loss"].is_null());
}

// A console that writes into a string, with a clock that the test sets.
struct Screen {
  std::ostringstream text;
  double now = 0;
  ConsoleOptions options(int64_t every, bool colour = false) {
    return {.every = every, .colour = colour, .out = &text, .clock = [this] {
              return now;
            }};
  }
};

TEST(Console, WritesALineAndTheTimeLeft) {
  Screen screen;
  Console sink(info_in(""), screen.options(1));
  StepRecord record = record_of(1);
  record.step_s = 2;
  sink.step(record);
  EXPECT_EQ(screen.text.str(),
            "step:    1/1000  loss:  7.61234  lr: 3.00e-04  "
            "grad_norm:  1.2345  tokens: 4,096  "
            "tokens/s: 24,690 (12,345 a rank)  memory:  0.52GiB(2.17%)  "
            "left: 33m18s\n");
  screen.text.str("");
  screen.now = 0.5;
  record = record_of(2);
  record.tflops = 0.123;
  record.mfu = 0.081;
  record.validation = Validation{.loss = 6.5, .tokens = 9000, .seconds = 1.5};
  sink.step(record);
  EXPECT_EQ(screen.text.str(),
            "step:    2/1000  loss:  7.61234  lr: 3.00e-04  "
            "grad_norm:  1.2345  tokens: 8,192  "
            "tokens/s: 24,690 (12,345 a rank)  mfu: 8.10%  "
            "memory:  0.52GiB(2.17%)  left: 8m19s\n"
            "validate step: 2  loss:  6.50000  "
            "tokens/s: 6,000 (3,000 a rank)\n");
}

TEST(Console, ShowsTheFirstTheLastAndEveryNthStep) {
  Screen screen;
  RunInfo info = info_in("", 3);
  info.total_steps = 25;
  Console sink(info, screen.options(10));
  for (int64_t step = 4; step <= 25; ++step) sink.step(record_of(step));
  std::istringstream text(screen.text.str());
  std::vector<std::string> steps;
  for (std::string line; std::getline(text, line);) {
    steps.push_back(line.substr(6, 2));
  }
  EXPECT_THAT(steps, ElementsAre(" 4", "10", "20", "25"));
}

// What a model writes may be anything.
TEST(Console, ShowsASampleLineByLine) {
  Screen screen;
  Console sink(info_in(""), screen.options(100));
  sink.step(record_of(1));
  screen.text.str("");
  StepRecord record = record_of(2);
  record.sample = Sample{
      .prompt = "once", .text = " a\ncat\033[2J", .tokens = 5, .seconds = 0.25};
  sink.step(record);
  EXPECT_THAT(screen.text.str(),
              HasSubstr("sample step: 2  tokens: 5 in 0.25s\n"
                        "  | once a\n"
                        "  | cat\\u001b[2J\n"));
}

TEST(Console, ColoursFieldsWhereAskedTo) {
  Screen screen;
  Console sink(info_in(""), screen.options(1, /*colour=*/true));
  sink.step(record_of(1));
  EXPECT_THAT(screen.text.str(),
              HasSubstr("\033[31mstep:    1/1000\033[39m  "));
}

TEST(Console, NeedsATerminalForColours) {
  unsetenv("NO_COLOR");
  setenv("TERM", "xterm", 1);
  setenv(kTerminalVariable, "1", 1);
  EXPECT_TRUE(wants_colour());
  setenv("TERM", "dumb", 1);
  EXPECT_FALSE(wants_colour());
  setenv("TERM", "xterm", 1);
  setenv("NO_COLOR", "1", 1);
  EXPECT_FALSE(wants_colour());
  unsetenv("NO_COLOR");
  unsetenv(kTerminalVariable);
}

TEST(Console, WritesTimesAndCountsForPeople) {
  EXPECT_EQ(format_duration(-1), "0s");
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(59.6), "1m00s");
  EXPECT_EQ(format_duration(7500), "2h05m");
  EXPECT_EQ(format_duration(3 * 86400 + 4 * 3600 + 59), "3d04h");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()),
            "11574d01h");
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-1234567), "-1,234,567");
}

TEST(Sinks, FillARunFolder) {
  const TemporaryFolder folder;
  const RunInfo info = info_in(folder.file("runs/one"));
  auto sink = make_sinks({.every = 1000, .tensorboard = true}, info);
  for (int64_t step = 1; step <= 3; ++step) sink->step(record_of(step));
  sink->close({});

  RunInfo resumed = info;
  resumed.first_step = 2;
  sink = make_sinks({.every = 1000, .tensorboard = false}, resumed);
  sink->step(record_of(3));
  sink->close({.reason = "stopped", .exit_code = 75, .message = ""});
  EXPECT_THAT(steps_in(info.folder + "/metrics.jsonl"), ElementsAre(1, 2, 3));
  std::vector<std::string> events;
  for (const auto& entry : std::filesystem::directory_iterator(info.folder)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("events.")) events.push_back(name);
  }
  EXPECT_EQ(events.size(), 1);
  const Json json = parse_json(read_file(info.folder + "/summary.json"), "it");
  EXPECT_EQ(json["reason"], "stopped");
}

TEST(Summary, KnowsTheLowestLossOfTheStartsBefore) {
  const TemporaryFolder folder;
  RunInfo info = info_in(folder.file("run"), 4);
  info.best_valid_loss = 2.5;
  auto sink = make_sinks({.every = 1000, .tensorboard = false}, info);
  StepRecord record = record_of(5);
  record.validation = {.loss = 7, .tokens = 1, .seconds = 1};
  sink->step(record);
  sink->close({});
  const Json json = parse_json(read_file(info.folder + "/summary.json"), "it");
  EXPECT_EQ(json["best_valid_loss"], 2.5);
  EXPECT_EQ(json["last_valid_loss"], 7);
}

TEST(Summary, TheLowestLossIsOneThatIsANumber) {
  const TemporaryFolder folder;
  const RunInfo info = info_in(folder.file("run"), 4);
  auto sink = make_sinks({.every = 1000, .tensorboard = false}, info);
  for (const double loss : {std::nan(""), 2.0, std::nan(""), 3.0}) {
    StepRecord record = record_of(5);
    record.validation = {.loss = loss, .tokens = 1, .seconds = 1};
    sink->step(record);
  }
  sink->close({});
  const Json json = parse_json(read_file(info.folder + "/summary.json"), "it");
  EXPECT_EQ(json["best_valid_loss"], 2.0);
}

}  // namespace
}  // namespace tessera::monitor
