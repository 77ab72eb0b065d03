// The lowest loss on data.valid so far, and what follows from it: which
// checkpoint stays (checkpoint.keep_best) and when a run ends
// (validate.patience).
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::train {

struct BestLoss {
  double loss = 0;    // nats a token
  int64_t step = 0;   // after which it was measured
  int64_t since = 0;  // validations that came after and were not lower
};

// With one more validation. A loss that is no number is never the lowest.
inline BestLoss with_validation(const std::optional<BestLoss>& best,
                                double loss, int64_t step) {
  const bool was_number = best && best->loss == best->loss;
  if (!best || loss < best->loss || (!was_number && loss == loss)) {
    return {.loss = loss, .step = step};
  }
  return {.loss = best->loss, .step = best->step, .since = best->since + 1};
}

}  // namespace tessera::train
