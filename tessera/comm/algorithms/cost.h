// What an algorithm costs, in the alpha-beta-gamma model.
//
// alpha: seconds a message takes to start; beta: seconds a byte on its way;
// gamma: seconds to reduce a byte. A rank sends and receives one message each
// at a time. Every algorithm's header has its formula and a function for it;
// algorithms_test.cpp counts each term and finds it equal.
#pragma once

#include <cstdint>

namespace tessera::comm::algorithms {

struct Link {
  double alpha = 0.0;
  double beta = 0.0;
  double gamma = 0.0;

  double seconds(int64_t steps, int64_t bytes) const {
    return alpha * static_cast<double>(steps) +
           beta * static_cast<double>(bytes);
  }
};

// Along the longest way from the call on all ranks to the end of the last.
struct Cost {
  int64_t steps = 0;    // messages after each other
  int64_t bytes = 0;    // in these messages
  int64_t reduced = 0;  // bytes

  double seconds(const Link& link) const {
    return link.seconds(steps, bytes) +
           link.gamma * static_cast<double>(reduced);
  }
  Cost operator+(const Cost& other) const {
    return {steps + other.steps, bytes + other.bytes, reduced + other.reduced};
  }
  bool operator==(const Cost&) const = default;
};

// ceil(log2(ranks)): how often a set of ranks that doubles has to.
constexpr int64_t doublings(int64_t ranks) {
  int64_t steps = 0;
  while ((int64_t{1} << steps) < ranks) ++steps;
  return steps;
}

}  // namespace tessera::comm::algorithms
