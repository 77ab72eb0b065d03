#include "tessera/monitor/report/run_history.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <string_view>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/monitor/json_lines.h"

namespace tessera::monitor::report {
namespace {

namespace fs = std::filesystem;
using tessera::detail::Json;

void add_settings(const Json& section, const std::string& path,
                  std::map<std::string, std::string>& settings) {
  for (const auto& [key, value] : section.items()) {
    if (value.is_object()) {
      add_settings(value, path + key + ".", settings);
    } else {
      settings[path + key] = value.dump();
    }
  }
}

// null stands for what is unknown or no number.
double value_of(const Json& value) {
  return value.is_number() ? value.get<double>()
                           : std::numeric_limits<double>::quiet_NaN();
}

void add_figures(const Json& line, RunHistory& history) {
  const auto step = line["step"].get<double>();
  const auto add = [&](const std::string& name, const Json& value) {
    if (value.is_null() && !history.figures.contains(name)) return;
    history.figures[name].emplace_back(step, value_of(value));
  };
  for (const auto& [name, value] : line.items()) {
    if (value.is_structured()) {
      for (const auto& [part, inside] : value.items()) {
        add(name + "." + part, inside);
      }
    } else if (name != "step") {
      add(name, value);
    }
  }
}

// Takes each line of a file of steps; one that is none is refused as no `what`.
void for_each_record(const std::string& path, const char* what,
                     const std::function<void(const Json&)>& take) {
  int64_t number = 0;
  for_each_line(path, [&](const std::string& line) {
    const std::string where = c10::str(path, ": line ", ++number);
    const Json json = tessera::detail::parse_json(line, where);
    TS_CHECK_IO(json.is_object() && json.contains("step"), where, ": is no ",
                what, " of a run.");
    tessera::detail::reading(where, [&] { take(json); });
    return true;
  });
}

void read_metrics(const std::string& path, RunHistory& history) {
  for_each_record(path, "step",
                  [&](const Json& json) { add_figures(json, history); });
}

void read_samples(const std::string& path, RunHistory& history) {
  for_each_record(path, "sample", [&](const Json& json) {
    history.samples.push_back({.step = json.value("step", int64_t{0}),
                               .prompt = json.value("prompt", ""),
                               .text = json.value("text", "")});
  });
}

void read_summary(const std::string& path, RunHistory& history) {
  const Json json = tessera::detail::parse_json(read_file(path), path);
  for (const auto& [key, value] : json.items()) {
    if (value.is_structured() || value.is_null()) continue;
    history.summary[key] =
        value.is_string() ? value.get<std::string>() : value.dump();
  }
  for (const Json& of : json.value("communication", Json::array())) {
    history.traffic.push_back(
        {.group = of.value("group", ""),
         .verb = of.value("verb", ""),
         .calls = of.value("calls", int64_t{0}),
         .bytes = of.value("bytes", int64_t{0}),
         .seconds = value_of(of.value("seconds", Json()))});
  }
  for (const Json& of : json.value("links", Json::array())) {
    history.links.push_back(
        {.from = of.value("from", int64_t{0}),
         .to = of.value("to", int64_t{0}),
         .latency_us = value_of(of.value("latency_us", Json())),
         .gbps = value_of(of.value("gbps", Json()))});
  }
  for (const Json& of : json.value("ranks", Json::array())) {
    history.ranks.push_back(
        {.rank = of.value("rank", int64_t{0}),
         .work_s = value_of(of.value("work_s", Json())),
         .wait_s = value_of(of.value("wait_s", Json())),
         .slowest_in = of.value("slowest_in", int64_t{0}),
         .mem_peak_mib = value_of(of.value("mem_peak_mib", Json()))});
  }
}

// How many letters a line of a log begins with that say when: date, time and
// zone, the time alone in older ones; 0: none, it goes on from the one before.
size_t letters_of_time(std::string_view line) {
  for (const std::string_view form :
       {"0000-00-00 00:00:00+0000 ", "00:00:00 "}) {
    const auto is_like = [](char sign, char letter) {
      if (sign == '0') return letter >= '0' && letter <= '9';
      return letter == sign || (sign == '+' && letter == '-');
    };
    if (std::ranges::equal(form, line.substr(0, form.size()), is_like)) {
      return form.size() - 1;
    }
  }
  return 0;
}

// "12:30:01 [rank 0/2 ...] resumed after step 40": what is told and is not of
// every step.
void read_log(const std::string& path, RunHistory& history) {
  constexpr std::string_view kResumed = "resumed after step ";
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t time = letters_of_time(line);
    if (time == 0) continue;
    std::string text = line.substr(time + 1);
    if (text.starts_with("[rank")) {
      const size_t end = text.find("] ");
      if (end == std::string::npos) continue;
      text = text.substr(end + 2);
    }
    history.events.push_back({line.substr(0, time), text});
    if (!text.starts_with(kResumed)) continue;
    double step = 0;
    const char* const digits = text.data() + kResumed.size();
    std::from_chars(digits, text.data() + text.size(), step);
    history.resumed_after.push_back(step);
  }
}

}  // namespace

bool has_ended(const fs::path& folder) {
  const fs::path metrics = folder / "metrics.jsonl",
                 summary = folder / "summary.json";
  return fs::exists(summary) &&
         (!fs::exists(metrics) ||
          fs::last_write_time(summary) >= fs::last_write_time(metrics));
}

RunHistory read_history(const std::string& folder) {
  const fs::path path(folder);
  TS_CHECK_IO(fs::exists(path / "metrics.jsonl"), folder,
              ": is no folder of a run: it has no metrics.jsonl. Give "
              "RUN_DIR/NAME.");
  RunHistory history{.folder = folder};
  const fs::path named = fs::absolute(path).lexically_normal();
  history.name = named.has_filename() ? named.filename().string()
                                      : named.parent_path().filename().string();
  if (fs::exists(path / "config.json")) {
    const std::string config = (path / "config.json").string();
    add_settings(tessera::detail::parse_json(read_file(config), config), "",
                 history.settings);
  }
  read_metrics((path / "metrics.jsonl").string(), history);
  read_samples((path / "samples.jsonl").string(), history);
  if (has_ended(path)) {
    const std::string summary = (path / "summary.json").string();
    tessera::detail::reading(summary, [&] { read_summary(summary, history); });
  }
  read_log((path / "logs" / "rank-0.log").string(), history);
  return history;
}

}  // namespace tessera::monitor::report
