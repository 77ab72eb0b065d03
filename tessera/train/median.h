// Medians of few numbers: of an even count the lower or the upper one.
// REQUIRES: one number at least.
#pragma once

#include <algorithm>
#include <cstddef>
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

}  // namespace tessera::train
