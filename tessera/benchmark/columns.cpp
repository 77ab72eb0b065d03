#include "tessera/benchmark/columns.h"

#include <algorithm>
#include <cstdio>

namespace tessera::benchmark {

std::string aligned(const Lines& lines) {
  std::vector<size_t> widths(lines.front().size());
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      widths[i] = std::max(widths[i], line[i].size());
    }
  }
  std::string text;
  for (size_t n = 0; n < lines.size(); ++n) {
    text += n == 0 ? "#" : " ";
    for (size_t i = 0; i < lines[n].size(); ++i) {
      text.append(2 + widths[i] - lines[n][i].size(), ' ');
      text += lines[n][i];
    }
    text += "\n";
  }
  return text;
}

std::string fixed(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

}  // namespace tessera::benchmark
