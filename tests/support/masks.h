// The masks of nn/dropout.h as its header says them, number by number.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tessera/nn/dropout.h"

namespace tessera::masks {

inline double share_of(const nn::Dropout& dropout, int64_t sample, int64_t head,
                       int64_t row, int64_t column) {
  const auto word = [](int64_t number) {
    return static_cast<uint32_t>(number);
  };
  const auto words = random::philox4x32_10(
      {word(column / 64 * 16 + column % 16), word(row),
       word(dropout.first_head + head), word(dropout.first_sample + sample)},
      dropout.key);
  const double drawn = words[static_cast<size_t>(column % 64 / 16)];
  const double bound = std::floor(std::ldexp(dropout.rate, 32));
  return drawn < bound ? 0.0 : 1 / (1 - dropout.rate);
}

inline std::vector<int64_t> run_of(int64_t begin, int64_t length) {
  std::vector<int64_t> run(length);
  std::iota(run.begin(), run.end(), begin);
  return run;
}

inline std::vector<int64_t> all_of(const nn::Positions& positions) {
  std::vector<int64_t> all;
  for (const auto& [begin, length] : positions) {
    for (int64_t each : run_of(begin, length)) all.push_back(each);
  }
  return all;
}

// (samples, heads, rows, columns) of fp64.
inline at::Tensor mask_of(const nn::Dropout& dropout, int64_t samples,
                          int64_t heads, const std::vector<int64_t>& rows,
                          const std::vector<int64_t>& columns) {
  at::Tensor mask = at::empty(
      {samples, heads, std::ssize(rows), std::ssize(columns)}, at::kDouble);
  auto* to = mask.mutable_data_ptr<double>();
  for (int64_t b = 0; b < samples; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t row : rows) {
        for (int64_t column : columns) {
          *to++ = share_of(dropout, b, h, row, column);
        }
      }
    }
  }
  return mask;
}

// Of features: (samples, rows, width).
inline at::Tensor mask_of(const nn::Dropout& dropout, int64_t samples,
                          const nn::Positions& positions, int64_t width) {
  return mask_of(dropout, samples, 1, all_of(positions), run_of(0, width))
      .squeeze(1);
}

}  // namespace tessera::masks
