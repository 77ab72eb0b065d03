#include "tessera/benchmark/columns.h"

#include <algorithm>

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
    text += in_columns(lines[n], widths);
  }
  return text;
}

std::string in_columns(const std::vector<std::string>& words,
                       std::span<const size_t> widths) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t width = std::max(widths[i], words[i].size());
    text.append(2 + width - words[i].size(), ' ');
    text += words[i];
  }
  return text + "\n";
}

}  // namespace tessera::benchmark
