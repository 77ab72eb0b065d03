#include "tessera/program/executor.h"

#include <c10/util/Exception.h>

#include <chrono>

#include "tessera/core/error.h"

namespace tessera::program {
namespace {

void run(const Instruction& instruction, Stage& stage) {
  const int64_t m = instruction.microbatch, unit = instruction.unit;
  switch (instruction.op) {
    case Op::kZeroGradients:
      return stage.zero_gradients();
    case Op::kLoadInputs:
      return stage.load_inputs(m);
    case Op::kLoadTargets:
      return stage.load_targets(m);
    case Op::kForward:
      return stage.forward(m, unit);
    case Op::kBackward:
      return stage.backward(m, unit);
    case Op::kGatherParameters:
      return stage.gather_parameters(unit);
    case Op::kFreeParameters:
      return stage.free_parameters(unit);
    case Op::kReduceGradients:
      return stage.reduce_gradients(unit);
    case Op::kAwaitGradients:
      return stage.await_gradients();
    case Op::kSendActivations:
    case Op::kReceiveActivations:
    case Op::kSendGradients:
    case Op::kReceiveGradients:
      TORCH_INTERNAL_ASSERT(false, "messages are exchanged together");
    case Op::kClipNorm:
      return stage.clip_norm();
    case Op::kOptimizerStep:
      return stage.optimizer_step();
  }
}

}  // namespace

void execute(const Program& program, Stage& stage, const Observer& observer) {
  for (size_t i = 0; i < program.size(); ++i) {
    const Instruction& instruction = program[i];
    Program messages;
    while (i < program.size() && is_message(program[i].op)) {
      messages.push_back(program[i++]);
    }
    const auto start = std::chrono::steady_clock::now();
    rank_context().doing =
        describe(messages.empty() ? instruction : messages[0]);
    try {
      if (messages.empty()) {
        run(instruction, stage);
      } else {
        --i;
        stage.exchange(messages);
      }
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
  rank_context().doing.clear();
}

}  // namespace tessera::program
