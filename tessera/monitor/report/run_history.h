// What a run folder tells of its run, for the page: figures by step, and what
// happened.
//
// Errors: TS_CHECK_IO with file and line, where one cannot be read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/monitor/report/chart.h"

namespace tessera::monitor::report {

struct Event {
  std::string time;  // as the log has it: of day alone in older ones
  std::string text;
};

struct Traffic {
  std::string group, verb;
  int64_t calls = 0, bytes = 0;
  double seconds = 0;
};

struct Link {
  int64_t from = 0, to = 0;
  double latency_us = 0, gbps = 0;
};

// What a rank did in the last start's steps.
struct Rank {
  int64_t rank = 0;
  double work_s = 0, wait_s = 0;
  int64_t slowest_in = 0;  // steps
  double mem_peak_mib = 0;
};

// What the model wrote after a step.
struct WrittenText {
  int64_t step = 0;
  std::string prompt, text;
};

struct RunHistory {
  std::string folder;
  std::string name;
  std::map<std::string, std::string> settings;  // "optimizer.lr" -> "0.001"
  std::map<std::string, std::string> summary;   // its single values, as text
  std::vector<Traffic> traffic;                 // of rank 0
  std::vector<Link> links;
  std::vector<Rank> ranks;  // of two or more
  // By name in metrics.jsonl; "seconds.wait" and "expert_load.0" too.
  std::map<std::string, Points> figures;
  std::vector<WrittenText> samples;   // of samples.jsonl
  std::vector<Event> events;          // from rank 0's log
  std::vector<double> resumed_after;  // steps
};

// Whether a run's folder says how its last start ended: its summary.json is no
// older than what the run wrote last.
bool has_ended(const std::filesystem::path& folder);

// TS_CHECK_IO where `folder` is not the folder of a run with a metrics.jsonl.
RunHistory read_history(const std::string& folder);

}  // namespace tessera::monitor::report
