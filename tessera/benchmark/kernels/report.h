// What `tessera bench kernels` shows: a table, and all figures as JSON.
// Units: time in us, bandwidth in GB/s (1e9 bytes), arithmetic in GFLOP/s.
#pragma once

#include <string>
#include <vector>

#include "tessera/benchmark/circumstances.h"
#include "tessera/benchmark/kernels/measure.h"

namespace tessera::benchmark::kernels {

std::string heading(const Circumstances& around);
// The table's first line and a line of it, each shown when it is known.
std::string column_names();
std::string line(const Row& row);
std::string json(const Circumstances& around, const std::vector<Row>& rows);

}  // namespace tessera::benchmark::kernels
