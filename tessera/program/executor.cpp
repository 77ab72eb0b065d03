#include "tessera/program/executor.h"

#include <c10/util/Exception.h>

#include <chrono>

namespace tessera::program {
namespace {

void run(const Instruction& instruction, Stage& stage) {
  const int64_t m = instruction.microbatch;
  switch (instruction.op) {
    case Op::kZeroGradients:
      return stage.zero_gradients();
    case Op::kLoadInputs:
      return stage.load_inputs(m);
    case Op::kLoadTargets:
      return stage.load_targets(m);
    case Op::kForward:
      return stage.forward(m);
    case Op::kBackward:
      return stage.backward(m, /*reduce=*/false);
    case Op::kBackwardReduce:
      return stage.backward(m, /*reduce=*/true);
    case Op::kReduceGradients:
      return stage.reduce_gradients();
    case Op::kClipNorm:
      return stage.clip_norm();
    case Op::kOptimizerStep:
      return stage.optimizer_step();
  }
}

}  // namespace

void execute(const Program& program, Stage& stage, const Observer& observer) {
  for (const auto& instruction : program) {
    const auto start = std::chrono::steady_clock::now();
    try {
      run(instruction, stage);
    } catch (c10::Error& error) {
      error.add_context("while running " + describe(instruction));
      throw;
    }
    if (observer) {
      const std::chrono::duration<double> taken =
          std::chrono::steady_clock::now() - start;
      observer(instruction, taken.count());
    }
  }
}

}  // namespace tessera::program
