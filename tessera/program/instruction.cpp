#include "tessera/program/instruction.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::program {

Ends ends_of(const Instruction& message, int64_t stage, int64_t stages,
             Placement placement /* = kRoundRobin */) {
  TORCH_INTERNAL_ASSERT(is_message(message.op), describe(message),
                        " is no message");
  Ends ends;
  ends.sends = is_send(message.op);
  ends.activations = message.op == Op::kSendActivations ||
                     message.op == Op::kReceiveActivations;
  const Pipeline pipeline{
      .stages = stages, .chunks = message.chunk + 1, .placement = placement};
  const int64_t here = pipeline.run_of({stage, message.chunk});
  const int64_t there = here + (ends.sends == ends.activations ? 1 : -1);
  TORCH_INTERNAL_ASSERT(there >= 0, "program: stage ", stage, ": ",
                        describe(message), ": there is no stage before it");
  ends.sender = ends.sends ? here : there;
  ends.receiver = ends.sends ? there : here;
  ends.peer_stage = pipeline.place_of(there, message.chunk).stage;
  return ends;
}

const char* name_of(Op op) {
  switch (op) {
    case Op::kReplicateParameters:
      return "ReplicateParameters";
    case Op::kZeroGradients:
      return "ZeroGradients";
    case Op::kShareBatch:
      return "ShareBatch";
    case Op::kLoadInputs:
      return "LoadInputs";
    case Op::kLoadTargets:
      return "LoadTargets";
    case Op::kLoadDocuments:
      return "LoadDocuments";
    case Op::kForward:
      return "Forward";
    case Op::kRecompute:
      return "Recompute";
    case Op::kReplay:
      return "Replay";
    case Op::kLoss:
      return "Loss";
    case Op::kBackward:
      return "Backward";
    case Op::kBackwardInput:
      return "BackwardInput";
    case Op::kBackwardWeight:
      return "BackwardWeight";
    case Op::kGatherParameters:
      return "GatherParameters";
    case Op::kFreeParameters:
      return "FreeParameters";
    case Op::kAllocateGradients:
      return "AllocateGradients";
    case Op::kReduceGradients:
      return "ReduceGradients";
    case Op::kSumGradients:
      return "SumGradients";
    case Op::kReduceReplicas:
      return "ReduceReplicas";
    case Op::kSendActivations:
      return "SendActivations";
    case Op::kReceiveActivations:
      return "ReceiveActivations";
    case Op::kSendGradients:
      return "SendGradients";
    case Op::kReceiveGradients:
      return "ReceiveGradients";
    case Op::kHandActivations:
      return "HandActivations";
    case Op::kHandGradients:
      return "HandGradients";
    case Op::kNorm:
      return "Norm";
    case Op::kSumNorm:
      return "SumNorm";
    case Op::kClipGradients:
      return "ClipGradients";
    case Op::kGatherUpdates:
      return "GatherUpdates";
    case Op::kKeepParameters:
      return "KeepParameters";
    case Op::kOptimizerStep:
      return "OptimizerStep";
    case Op::kNextVersion:
      return "NextVersion";
    case Op::kFetchStates:
      return "FetchStates";
    case Op::kReleaseStates:
      return "ReleaseStates";
    case Op::kFetchParameters:
      return "FetchParameters";
    case Op::kReleaseParameters:
      return "ReleaseParameters";
  }
  TORCH_INTERNAL_ASSERT(false, "an op without a name");
}

bool is_send(Op op) {
  return op == Op::kSendActivations || op == Op::kSendGradients;
}

bool is_hand_over(Op op) {
  return op == Op::kHandActivations || op == Op::kHandGradients;
}

bool is_message(Op op) {
  return is_send(op) || op == Op::kReceiveActivations ||
         op == Op::kReceiveGradients;
}

bool is_communication(Op op) {
  return is_message(op) || op == Op::kGatherParameters ||
         op == Op::kReduceGradients || op == Op::kSumGradients ||
         op == Op::kSumNorm || op == Op::kGatherUpdates ||
         op == Op::kShareBatch;
}

bool is_compute(Op op) {
  return op == Op::kForward || is_again(op) || op == Op::kBackwardInput ||
         adds_gradients(op);
}

bool is_again(Op op) { return op == Op::kRecompute || op == Op::kReplay; }

bool adds_gradients(Op op) {
  return op == Op::kBackward || op == Op::kBackwardWeight;
}

bool reads_parameters(Op op) {
  return op == Op::kLoss || (is_compute(op) && op != Op::kBackwardWeight);
}

bool is_fetch(Op op) {
  return op == Op::kFetchStates || op == Op::kFetchParameters;
}

bool is_release(Op op) {
  return op == Op::kReleaseStates || op == Op::kReleaseParameters;
}

Op release_of(Op fetch) {
  return fetch == Op::kFetchStates ? Op::kReleaseStates
                                   : Op::kReleaseParameters;
}

Op fetch_of(Op release) {
  return release == Op::kReleaseStates ? Op::kFetchStates
                                       : Op::kFetchParameters;
}

bool trains(const Program& program) {
  return std::ranges::any_of(
      program, [](const Instruction& each) { return adds_gradients(each.op); });
}

std::vector<Program> steps_of(const Program& program,
                              int64_t num_microbatches) {
  std::vector<Program> steps(1);
  bool ended = false;
  for (Instruction each : program) {
    if (std::exchange(ended, false)) steps.emplace_back();
    const int64_t before = std::ssize(steps) - 1;
    each.version -= before;
    if (each.microbatch >= 0) each.microbatch -= before * num_microbatches;
    TORCH_INTERNAL_ASSERT(each.version >= 0, "program: in step ", before, ": ",
                          describe(each), " is of the step before");
    steps.back().push_back(each);
    ended = each.op == Op::kNextVersion;
  }
  return steps;
}

Instruction begin(Instruction whole) {
  whole.phase = Phase::kBegin;
  return whole;
}

Instruction await(Instruction whole) {
  whole.phase = Phase::kAwait;
  return whole;
}

std::string describe(const Instruction& instruction) {
  std::string text = instruction.phase == Phase::kBegin   ? "begin "
                     : instruction.phase == Phase::kAwait ? "await "
                                                          : "";
  text += name_of(instruction.op);
  if (instruction.microbatch >= 0) {
    text += " " + std::to_string(instruction.microbatch);
  }
  if (instruction.chunk > 0) {
    text += " chunk " + std::to_string(instruction.chunk);
  }
  if (instruction.unit >= 0) {
    text += " unit " + std::to_string(instruction.unit);
  }
  if (instruction.version > 0) {
    text += " version " + std::to_string(instruction.version);
  }
  return text;
}

std::string describe(const Program& program) {
  std::string text;
  for (const auto& instruction : program) text += describe(instruction) + "\n";
  return text;
}

}  // namespace tessera::program
