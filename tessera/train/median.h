// Medians: of an even count the lower or the upper one. REQUIRES: one number at
// least, but where it is said.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace tessera::train {

inline double nth_smallest(std::vector<double> of, std::ptrdiff_t n) {
  std::ranges::nth_element(of, of.begin() + n);
  return of[n];
}

inline double lower_median(std::vector<double> of) {
  const auto middle = (std::ssize(of) - 1) / 2;
  return nth_smallest(std::move(of), middle);
}

inline double upper_median(std::vector<double> of) {
  const auto middle = std::ssize(of) / 2;
  return nth_smallest(std::move(of), middle);
}

// The upper median of all numbers but one, whichever that is: all are gone
// through once.
class MedianOfOthers {
 public:
  // Of none, too.
  explicit MedianOfOthers(const std::vector<double>& all)
      : has_others_(all.size() > 1) {
    if (!has_others_) return;
    const auto middle = (std::ssize(all) - 1) / 2;
    below_ = nth_smallest(all, middle);
    above_ = nth_smallest(all, middle + 1);
  }
  // nullopt: there are no others. REQUIRES: `one` is among them.
  std::optional<double> without(double one) const {
    if (!has_others_) return std::nullopt;
    return one <= below_ ? above_ : below_;
  }

 private:
  bool has_others_;
  double below_ = 0, above_ = 0;  // the median without a larger, a smaller one
};

}  // namespace tessera::train
