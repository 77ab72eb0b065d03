#include "tessera/data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

constexpr int64_t kLongestPeriod = int64_t{1} << 20;

// The weights as whole numbers, where a power of ten makes them that.
std::optional<std::vector<int64_t>> exact_parts(
    const std::vector<double>& weights) {
  constexpr double kLargest = 1e12, kLargestFactor = 1e6;
  for (double factor = 1; factor <= kLargestFactor; factor *= 10) {
    std::vector<int64_t> parts;
    for (const double weight : weights) {
      const double scaled = weight * factor, whole = std::round(scaled);
      if (scaled > kLargest || std::abs(scaled - whole) > 1e-12 * scaled) break;
      parts.push_back(static_cast<int64_t>(whole));
    }
    if (parts.size() < weights.size()) continue;
    const int64_t divisor =
        std::accumulate(parts.begin(), parts.end(), int64_t{0},
                        [](int64_t a, int64_t b) { return std::gcd(a, b); });
    for (int64_t& part : parts) part /= divisor;
    const auto sum = std::accumulate(parts.begin(), parts.end(), int64_t{0});
    if (sum <= kLongestPeriod) return parts;
  }
  return std::nullopt;
}

// Parts of the longest period: what rounding down leaves over goes to those who
// lost most by it. Who has a weight has a part.
std::vector<int64_t> rounded_parts(const std::vector<double>& weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> parts;
  std::vector<double> lost;
  for (const double weight : weights) {
    const double exact = weight / sum * kLongestPeriod;
    parts.push_back(std::max<int64_t>(static_cast<int64_t>(exact), weight > 0));
    lost.push_back(exact - static_cast<double>(parts.back()));
  }
  int64_t left =
      kLongestPeriod - std::accumulate(parts.begin(), parts.end(), int64_t{0});
  for (; left > 0; --left) {
    const auto i = std::max_element(lost.begin(), lost.end()) - lost.begin();
    ++parts[i];
    --lost[i];
  }
  for (; left < 0; ++left) --*std::max_element(parts.begin(), parts.end());
  return parts;
}

}  // namespace

Mixture::Mixture(const std::vector<double>& weights)
    : parts_(exact_parts(weights).value_or(std::vector<int64_t>{})) {
  if (parts_.empty()) parts_ = rounded_parts(weights);
  const auto period = std::accumulate(parts_.begin(), parts_.end(), int64_t{0});
  TORCH_INTERNAL_ASSERT(period > 0);
  std::vector<int64_t> given(parts_.size(), 0);
  order_.reserve(period);
  for (int64_t at = 0; at < period; ++at) {
    size_t chosen = parts_.size();
    int64_t chosen_last = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (parts_[i] == 0 || given[i] * period / parts_[i] > at) continue;
      // The position behind the last at which the bound is kept.
      const int64_t last =
          ((given[i] + 1) * period + parts_[i] - 1) / parts_[i];
      if (chosen == parts_.size() || last < chosen_last) {
        chosen = i;
        chosen_last = last;
      }
    }
    TORCH_INTERNAL_ASSERT(chosen < parts_.size() && chosen_last > at);
    order_.push_back({static_cast<uint32_t>(chosen),
                      static_cast<uint32_t>(given[chosen]++)});
  }
}

Mixture::Place Mixture::operator()(int64_t position) const {
  const Slot& slot = order_[position % period()];
  return {slot.source, position / period() * parts_[slot.source] + slot.index};
}

}  // namespace tessera::data
