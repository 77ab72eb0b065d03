// What `tessera bench kernels` shows: a table, and all figures as JSON.
// Units: time in us, bandwidth in GB/s (1e9 bytes), arithmetic in GFLOP/s.
#pragma once

#include <string>
#include <vector>

#include "tessera/benchmark/kernels/measure.h"

namespace tessera::benchmark::kernels {

// Where and how it was measured, for whoever reads the figures later.
struct Circumstances {
  std::string command;
  std::string host;
  std::string processor;
  std::string vectors;  // the widest
  int64_t cores = 0;    // that this process may use
  int64_t threads = 0;
  std::string build;  // versions
};

std::string heading(const Circumstances& around);
// The table's first line and a line of it, each shown when it is known.
std::string column_names();
std::string line(const Row& row);
std::string json(const Circumstances& around, const std::vector<Row>& rows);

}  // namespace tessera::benchmark::kernels
