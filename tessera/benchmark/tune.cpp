#include "tessera/benchmark/tune.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/core/error.h"

namespace tessera::benchmark {
namespace {

using comm::algorithms::Algorithm;
using comm::algorithms::TuningEntry;

constexpr double kWorthIt = 0.95;
constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max();

Algorithm algorithm_of(const Series& series) {
  const auto algorithm = comm::algorithms::algorithm_of(series.algorithm);
  TORCH_INTERNAL_ASSERT(algorithm, series.algorithm, " is in no table");
  return *algorithm;
}

const Cell& own_of(const Row& row, const std::string& backend) {
  for (const Cell& cell : row.cells) {
    if (cell.series.backend != backend) continue;
    if (algorithm_of(cell.series) == Algorithm::kOwn) return cell;
  }
  TORCH_INTERNAL_ASSERT(false, backend, "'s own algorithm was not measured");
}

bool has_forms(const Row& row) {
  return row.what.operation == Operation::kAllToAll;
}

Algorithm fastest(const Row& row, const std::string& backend) {
  Algorithm best = Algorithm::kOwn;
  double limit_us = has_forms(row) ? std::numeric_limits<double>::infinity()
                                   : kWorthIt * own_of(row, backend).time_us;
  for (const Cell& cell : row.cells) {
    const bool right = cell.wrong == 0;
    if (cell.series.backend != backend || !right) continue;
    if (cell.time_us >= limit_us) continue;
    best = algorithm_of(cell.series);
    limit_us = cell.time_us;
  }
  return best;
}

int64_t border_between(int64_t smaller, int64_t larger) {
  const double mean = std::sqrt(static_cast<double>(smaller)) *
                      std::sqrt(static_cast<double>(larger));
  return std::clamp(static_cast<int64_t>(std::llround(mean)), smaller + 1,
                    larger);
}

// The rows of one operation on one backend, in the order of their sizes.
std::vector<TuningEntry> entries_of(std::vector<const Row*> rows,
                                    const std::string& backend, int64_t hosts) {
  std::vector<TuningEntry> entries;
  int64_t border = 0;
  const auto bytes_of = [&](const Row& row) {
    return has_forms(row) ? row.bytes / hosts : row.bytes;
  };
  // Sizes below an element a rank are all that of one: the first counts.
  const auto again = std::ranges::unique(
      rows, {}, [&](const Row* row) { return bytes_of(*row); });
  rows.erase(again.begin(), again.end());
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = *rows[i];
    TuningEntry entry{.verb = *verb_of(row.what.operation),
                      .backend = backend,
                      .ranks = has_forms(row) ? hosts : row.ranks,
                      .min_bytes = border};
    border = i + 1 < rows.size()
                 ? border_between(bytes_of(row), bytes_of(*rows[i + 1]))
                 : kNoEnd;
    entry.max_bytes = border;
    entry.algorithm = fastest(row, backend);
    if (!entries.empty() && entries.back().algorithm == entry.algorithm) {
      entries.back().max_bytes = border;
    } else {
      entries.push_back(std::move(entry));
    }
  }
  std::erase_if(entries, [](const TuningEntry& entry) {
    return entry.algorithm == Algorithm::kOwn;
  });
  return entries;
}

std::vector<std::string> backends_in(const Row& row) {
  std::vector<std::string> names;
  for (const Cell& cell : row.cells) {
    const std::string& name = cell.series.backend;
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      names.push_back(name);
    }
  }
  return names;
}

}  // namespace

const std::vector<Operation>& tunable_operations() {
  static const std::vector<Operation> kTunable = {
      Operation::kAllReduce, Operation::kAllGather, Operation::kReduceScatter,
      Operation::kBroadcast};
  return kTunable;
}

std::vector<std::string> tunable_algorithms() {
  std::vector<std::string> names = comm::algorithms::algorithm_names();
  std::erase_if(names, [](const std::string& name) {
    return std::ranges::find(forms_of_all_to_all(), name) !=
           forms_of_all_to_all().end();
  });
  return names;
}

const std::vector<std::string>& forms_of_all_to_all() {
  static const std::vector<std::string> kForms = {
      name_of(Algorithm::kStraight), name_of(Algorithm::kAggregated)};
  return kForms;
}

comm::algorithms::TuningTable tuning_table(const std::vector<Row>& rows,
                                           const std::string& machine,
                                           int64_t hosts) {
  std::vector<TuningEntry> all;
  for (const Operation operation : all_operations()) {
    if (!verb_of(operation)) continue;
    std::vector<const Row*> its;
    for (const Row& row : rows) {
      if (row.what.operation == operation) its.push_back(&row);
    }
    if (its.empty()) continue;
    for (const std::string& backend : backends_in(*its.front())) {
      const auto entries = entries_of(its, backend, hosts);
      all.insert(all.end(), entries.begin(), entries.end());
    }
  }
  return comm::algorithms::TuningTable(std::move(all), machine);
}

}  // namespace tessera::benchmark
