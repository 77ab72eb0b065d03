// The measurement behind `tessera bench kernels`.
//
// Right:  before anything is timed, what a kernel gives is compared with fp64.
// Timing: ours and LibTorch's take turns, each first every other time, so that
//         their ratio is one of the same moment; a short call is repeated in a
//         timing. A time is the median over timings. A call that alone
//         fills the time given, and half a second, is timed that once.
// Errors: TS_CHECK, with its name, for a kernel that is further off than its
//         bound.
#pragma once

#include <string>

#include "tessera/benchmark/kernels/contest.h"

namespace tessera::benchmark::kernels {

struct Row {
  std::string kernel, dtype, shape;
  double ulps = 0;  // the largest error, in units of the type's last place
  double seconds = 0, libtorch_seconds = 0;
  double bytes = 0, flops = 0;  // of a call: one of them is 0
  int64_t timings = 0;          // of ours

  // Above 1: ours is the faster one.
  double ratio() const { return libtorch_seconds / seconds; }
};

// The largest over all elements. What is no number is infinitely far off.
double ulps_between(const std::vector<at::Tensor>& found,
                    const std::vector<Reference>& wanted);

// For about so many seconds, and three timings at least of what is not long.
Row measure(const Contest& contest, double seconds);

}  // namespace tessera::benchmark::kernels
