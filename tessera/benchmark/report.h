// What `tessera bench comm` shows: tables, and all figures as JSON.
//
// A table has the columns of nccl-tests, with the round trip of a cache line
// before and after the row behind them: "near", "far", or "changed" where the
// two differ so much that the row's times are of no one state.
// Units: time in us, bandwidth in GB/s (1e9), sizes in bytes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/benchmark/circumstances.h"
#include "tessera/benchmark/measure.h"

namespace tessera::benchmark {

// "near", "far", "changed", or "unknown".
const char* state_of(std::optional<double> before_ns,
                     std::optional<double> after_ns);

std::string heading(const Circumstances& around);
// The rows of one operation: a table for each series, and, where there are
// several, one in which they stand side by side.
std::string tables(const std::vector<Row>& rows);

std::string json(const Circumstances& around, const std::vector<Row>& rows);

// Elements that were wrong in any cell.
int64_t wrong_in(const std::vector<Row>& rows);

}  // namespace tessera::benchmark
