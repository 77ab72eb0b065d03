// The times, or bandwidths, of a run as an SVG: a panel an operation, in it a
// line a series (of each type and reduction, where there are several) over the
// size, both axes logarithmic.
#pragma once

#include <string>
#include <vector>

#include "tessera/benchmark/measure.h"

namespace tessera::benchmark {

enum class Plotted { kTime, kBusBandwidth };

// Operations without a size (barrier) have no panel.
std::string plot(const std::vector<Row>& rows, Plotted what,
                 const std::string& title);

}  // namespace tessera::benchmark
