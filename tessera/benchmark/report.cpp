#include "tessera/benchmark/report.h"

#include <algorithm>

#include "tessera/benchmark/columns.h"
#include "tessera/comm/verb.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/units.h"

namespace tessera::benchmark {
namespace {

using detail::Json;

// Cores that share a cache were seen at 60 to 110 ns, others at 280 to 490.
constexpr double kFarNs = 200;
constexpr double kChanged = 1.5;

bool has_size(const Row& row) {
  return row.what.operation != Operation::kBarrier;
}

std::string bandwidth(const Row& row, double value) {
  return has_size(row) ? fixed(value, 2) : "-";
}

std::string redop_of(const Row& row) {
  return reduces(row.what.operation) ? name_of(row.what.redop) : "none";
}

std::string root_of(const Row& row) {
  return row.what.operation == Operation::kBroadcast ? "0" : "-1";
}

std::vector<std::string> case_columns(const Row& row) {
  return {std::to_string(row.bytes), std::to_string(row.counts.piece),
          has_size(row) ? name_of(row.what.dtype) : "none", redop_of(row),
          root_of(row)};
}

std::vector<std::string> line_columns(const Row& row) {
  const auto text = [](const std::optional<double>& trip_ns) {
    return trip_ns ? fixed(*trip_ns, 0) : std::string("-");
  };
  return {text(row.trip_before_ns) + "/" + text(row.trip_after_ns),
          state_of(row.trip_before_ns, row.trip_after_ns)};
}

void append(std::vector<std::string>& line, std::vector<std::string> more) {
  line.insert(line.end(), more.begin(), more.end());
}

std::vector<std::string> case_names() {
  return {"size(B)", "count", "type", "redop", "root"};
}

std::vector<std::string> line_names() { return {"line(ns)", "state"}; }

std::string table_of(const std::vector<Row>& rows, size_t series) {
  Lines lines = {case_names()};
  append(lines[0], {"time(us)", "algbw(GB/s)", "busbw(GB/s)", "#wrong"});
  append(lines[0], line_names());
  for (const Row& row : rows) {
    const Cell& cell = row.cells[series];
    auto& line = lines.emplace_back(case_columns(row));
    append(line, {fixed(cell.time_us, 2), bandwidth(row, row.algbw(cell)),
                  bandwidth(row, row.busbw(cell)),
                  cell.wrong ? std::to_string(*cell.wrong) : "N/A"});
    append(line, line_columns(row));
  }
  return aligned(lines);
}

std::string side_by_side(const std::vector<Row>& rows) {
  Lines lines = {{"size(B)", "type", "redop"}};
  const auto& names = rows[0].cells;
  for (const Cell& cell : names) {
    append(lines[0], {cell.series.name() + "(us)", "busbw"});
    if (&cell != names.data()) {
      append(lines[0], {cell.series.name() + "/" + names[0].series.name()});
    }
  }
  append(lines[0], line_names());
  for (const Row& row : rows) {
    const auto columns = case_columns(row);
    auto& line = lines.emplace_back();
    append(line, {columns[0], columns[2], columns[3]});
    for (const Cell& cell : row.cells) {
      append(line, {fixed(cell.time_us, 2), bandwidth(row, row.busbw(cell))});
      if (&cell == row.cells.data()) continue;
      append(line, {fixed(cell.time_us / row.cells[0].time_us, 2)});
    }
    append(line, line_columns(row));
  }
  return aligned(lines);
}

Json json_of(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json json_of(const Row& row, const Cell& cell) {
  const bool sized = has_size(row);
  return {{"operation", name_of(row.what.operation)},
          {"backend", cell.series.backend},
          {"algorithm", cell.series.algorithm},
          {"registered", cell.series.registered},
          {"ranks", row.ranks},
          {"size_bytes", row.bytes},
          {"count", row.counts.piece},
          {"type", case_columns(row)[2]},
          {"redop", redop_of(row)},
          {"root", std::stoi(root_of(row))},
          {"time_us", cell.time_us},
          {"time_us_fastest_rank", cell.min_rank_us},
          {"time_us_slowest_rank", cell.max_rank_us},
          {"time_us_best", cell.best_us},
          {"algbw_gbps", sized ? Json(row.algbw(cell)) : Json(nullptr)},
          {"busbw_gbps", sized ? Json(row.busbw(cell)) : Json(nullptr)},
          {"wrong", cell.wrong ? Json(*cell.wrong) : Json(nullptr)},
          {"timings", cell.timings},
          {"calls_a_timing", cell.calls},
          {"ratio_to_first", cell.time_us / row.cells[0].time_us},
          {"line_ns_before", json_of(row.trip_before_ns)},
          {"line_ns_after", json_of(row.trip_after_ns)},
          {"state", state_of(row.trip_before_ns, row.trip_after_ns)}};
}

}  // namespace

const char* state_of(std::optional<double> before_ns,
                     std::optional<double> after_ns) {
  if (!before_ns || !after_ns) return "unknown";
  const auto [low, high] = std::minmax(*before_ns, *after_ns);
  if (high > kChanged * low) return "changed";
  return high < kFarNs ? "near" : "far";
}

std::string heading(const Circumstances& around) {
  return c10::str(
      heading_of(around),
      "# time: average over ranks of the median over timings; every buffer "
      "is rewritten by its owner before each"
      "\n# line: round trip of a cache line between two cores, before and "
      "after the row; state: near < ",
      kFarNs, " ns < far\n");
}

std::string tables(const std::vector<Row>& rows) {
  std::string text;
  if (rows.empty()) return text;
  const std::string name = name_of(rows[0].what.operation);
  for (size_t i = 0; i < rows[0].cells.size(); ++i) {
    text += "\n# " + name + ", " + rows[0].cells[i].series.name() + "\n" +
            table_of(rows, i);
  }
  if (rows[0].cells.size() > 1) {
    text += "\n# " + name + ", side by side\n" + side_by_side(rows);
  }
  return text;
}

std::string json(const Circumstances& around, const std::vector<Row>& rows) {
  Json cells = Json::array();
  for (const Row& row : rows) {
    for (const Cell& cell : row.cells) cells.push_back(json_of(row, cell));
  }
  Json document = json_of(around);
  document["cells"] = cells;
  return document.dump(1) + "\n";
}

int64_t wrong_in(const std::vector<Row>& rows) {
  int64_t wrong = 0;
  for (const Row& row : rows) {
    for (const Cell& cell : row.cells) wrong += cell.wrong.value_or(0);
  }
  return wrong;
}

}  // namespace tessera::benchmark
