#include "tessera/program/schedules/accumulation.h"

#include <c10/util/Exception.h>

namespace tessera::program::schedules {

Program accumulation(int64_t num_microbatches, bool clip) {
  TORCH_INTERNAL_ASSERT(num_microbatches >= 1);
  Program program{{Op::kZeroGradients}};
  for (int64_t m = 0; m < num_microbatches; ++m) {
    const bool last = m + 1 == num_microbatches;
    program.push_back({Op::kLoadInputs, m});
    program.push_back({Op::kForward, m});
    program.push_back({Op::kLoadTargets, m});
    program.push_back({last ? Op::kBackwardReduce : Op::kBackward, m});
  }
  program.push_back({Op::kReduceGradients});
  if (clip) program.push_back({Op::kClipNorm});
  program.push_back({Op::kOptimizerStep});
  return program;
}

}  // namespace tessera::program::schedules
