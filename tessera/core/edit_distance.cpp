#include "tessera/core/edit_distance.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace tessera {

int64_t edit_distance(std::string_view a, std::string_view b) {
  // Rows of the table for a's first i-2, i-1 and i letters.
  std::vector<int64_t> two_back(b.size() + 1), back(b.size() + 1),
      row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(two_back, back);
    std::swap(back, row);
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t replaced = back[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replaced, back[j] + 1, row[j - 1] + 1});
      const bool swapped =
          i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], two_back[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace tessera
