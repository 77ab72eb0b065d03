#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {

// All ranks of a group begin it first of all, in whatever order they load
// micro-batches then: none waits for another in the middle of a step.
Program batches(const Program& program, const Units& units) {
  if (!units.shares_batch) return program;
  const Instruction share{Op::kShareBatch};
  Program lowered = {begin(share)};
  lowered.insert(lowered.end(), program.begin(), program.end());
  lowered.push_back(await(share));
  return lowered;
}

}  // namespace tessera::program::passes
