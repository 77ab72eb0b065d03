#include "tessera/monitor/report/run_trace.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::monitor::report {
namespace {

using tessera::detail::Json;

SpanKind kind_named(const std::string& name, const std::string& where) {
  for (size_t i = 0; i < kNumSpanKinds; ++i) {
    const auto kind = static_cast<SpanKind>(i);
    if (name == name_of(kind)) return kind;
  }
  TS_CHECK_IO(false, where, ": there is no kind of span \"", name, "\".");
  return SpanKind::kWait;
}

// An event of the trace, where it is a slice.
std::optional<Span> span_of(const Json& event, const std::string& where) {
  if (event.at("ph") != "X") return std::nullopt;
  Span span{.name = event.at("name").get<std::string>(),
            .kind = kind_named(event.at("cat").get<std::string>(), where)};
  span.lane = event.at("tid").get<int64_t>();
  span.begin_s = event.at("ts").get<double>() * 1e-6;
  span.end_s = span.begin_s + event.at("dur").get<double>() * 1e-6;
  const Json& args = event.at("args");
  if (args.contains("for")) {
    span.awaited = kind_named(args.at("for").get<std::string>(), where);
  }
  for (const char* name : {"step", "microbatch", "unit", "chunk"}) {
    if (args.contains(name)) {
      span.args.emplace_back(name, args.at(name).get<int64_t>());
    }
  }
  return span;
}

int64_t step_of(const Span& span) {
  for (const auto& [name, value] : span.args) {
    if (std::string(name) == "step") return value;
  }
  return 0;
}

// One event a line, as trace.cpp writes them.
std::vector<TracedStep> read_rank(const std::string& path) {
  std::map<int64_t, TracedStep> steps;
  std::istringstream lines(read_file(path));
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (!line.starts_with("{\"ph\"")) continue;
    if (line.back() == ',') line.pop_back();
    const std::string where = c10::str(path, ":", number);
    auto span = tessera::detail::reading(where, [&] {
      return span_of(tessera::detail::parse_json(line, where), where);
    });
    if (!span || span->lane != kComputeLane) continue;
    TracedStep& step = steps[step_of(*span)];
    step.step = step_of(*span);
    step.spans.push_back(std::move(*span));
  }
  std::vector<TracedStep> all;
  for (auto& [step, traced] : steps) {
    std::ranges::sort(traced.spans, {}, &Span::begin_s);
    all.push_back(std::move(traced));
  }
  return all;
}

}  // namespace

std::vector<std::vector<TracedStep>> read_trace(const std::string& run) {
  std::vector<std::vector<TracedStep>> ranks;
  const auto path_of = [&](size_t rank) {
    return (std::filesystem::path(run) / "trace" /
            ("rank-" + std::to_string(rank) + ".json"))
        .string();
  };
  TS_CHECK_IO(std::filesystem::exists(path_of(0)), path_of(0),
              ": there is no trace of a run. A run writes one with "
              "monitor.trace, the number of steps in it.");
  while (std::filesystem::exists(path_of(ranks.size()))) {
    const std::string path = path_of(ranks.size());
    ranks.push_back(read_rank(path));
    TS_CHECK_IO(!ranks.back().empty(), path, ": there is no step in it.");
  }
  return ranks;
}

}  // namespace tessera::monitor::report
