#include "tessera/program/executor.h"

#include <c10/util/Exception.h>

#include <chrono>

#include "tessera/core/error.h"

namespace tessera::program {
namespace {

void run(const Instruction& instruction, bool awaited_next, Actor& actor) {
  const int64_t m = instruction.microbatch, unit = instruction.unit;
  actor.use_version(instruction.version);
  switch (instruction.op) {
    case Op::kReplicateParameters:
      return actor.replicate_parameters();
    case Op::kZeroGradients:
      return actor.zero_gradients();
    case Op::kLoadInputs:
      return actor.load_inputs(m);
    case Op::kLoadTargets:
      return actor.load_targets(m);
    case Op::kLoadDocuments:
      return actor.load_documents(m);
    case Op::kForward:
      return actor.forward(m, unit);
    case Op::kRecompute:
      return actor.recompute(m, unit);
    case Op::kReplay:
      return actor.replay(m, unit);
    case Op::kLoss:
      return actor.loss(m);
    case Op::kBackward:
    case Op::kBackwardInput:
    case Op::kBackwardWeight:
      return actor.backward(instruction.op, m, unit);
    case Op::kHandActivations:
      return actor.hand_activations(m, instruction.chunk);
    case Op::kHandGradients:
      return actor.hand_gradients(m, instruction.chunk);
    case Op::kFreeParameters:
      return actor.free_parameters(unit);
    case Op::kAllocateGradients:
      return actor.allocate_gradients(unit);
    case Op::kReduceReplicas:
      return actor.reduce_replicas();
    case Op::kNorm:
      return actor.norm();
    case Op::kClipGradients:
      return actor.clip_gradients();
    case Op::kKeepParameters:
      return actor.keep_parameters(unit);
    case Op::kOptimizerStep:
      return actor.optimizer_step(unit);
    case Op::kNextVersion:
      return actor.next_version();
    case Op::kReleaseStates:
    case Op::kReleaseParameters:
      return actor.release(instruction);
    case Op::kFetchStates:
    case Op::kFetchParameters:
    case Op::kGatherParameters:
    case Op::kReduceGradients:
    case Op::kSumGradients:
    case Op::kSumNorm:
    case Op::kGatherUpdates:
    case Op::kShareBatch:
    case Op::kSendActivations:
    case Op::kReceiveActivations:
    case Op::kSendGradients:
    case Op::kReceiveGradients:
      if (instruction.phase != Phase::kAwait) {
        actor.begin(instruction, awaited_next);
      }
      if (instruction.phase != Phase::kBegin) actor.await(instruction);
      return;
  }
}

double now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

[[noreturn]] void refuse(Op op) {
  TORCH_INTERNAL_ASSERT(false, "this actor knows no ", name_of(op));
}

}  // namespace

void Actor::use_version(int64_t version) {
  TORCH_INTERNAL_ASSERT(version == 0, "this actor has one version");
}
void Actor::zero_gradients() { refuse(Op::kZeroGradients); }
void Actor::load_inputs(int64_t /*microbatch*/) { refuse(Op::kLoadInputs); }
void Actor::load_targets(int64_t /*microbatch*/) { refuse(Op::kLoadTargets); }
void Actor::load_documents(int64_t /*microbatch*/) {
  refuse(Op::kLoadDocuments);
}
void Actor::forward(int64_t /*microbatch*/, int64_t /*unit*/) {
  refuse(Op::kForward);
}
void Actor::recompute(int64_t /*microbatch*/, int64_t /*unit*/) {
  refuse(Op::kRecompute);
}
void Actor::replay(int64_t /*microbatch*/, int64_t /*unit*/) {
  refuse(Op::kReplay);
}
void Actor::loss(int64_t /*microbatch*/) { refuse(Op::kLoss); }
void Actor::backward(Op part, int64_t /*microbatch*/, int64_t /*unit*/) {
  refuse(part);
}
void Actor::hand_activations(int64_t /*microbatch*/, int64_t /*chunk*/) {
  refuse(Op::kHandActivations);
}
void Actor::hand_gradients(int64_t /*microbatch*/, int64_t /*chunk*/) {
  refuse(Op::kHandGradients);
}
void Actor::free_parameters(int64_t /*unit*/) { refuse(Op::kFreeParameters); }
void Actor::allocate_gradients(int64_t /*unit*/) {
  refuse(Op::kAllocateGradients);
}
void Actor::norm() { refuse(Op::kNorm); }
void Actor::clip_gradients() { refuse(Op::kClipGradients); }
void Actor::keep_parameters(int64_t /*unit*/) { refuse(Op::kKeepParameters); }
void Actor::optimizer_step(int64_t /*unit*/) { refuse(Op::kOptimizerStep); }
void Actor::next_version() { refuse(Op::kNextVersion); }
void Actor::release(const Instruction& instruction) { refuse(instruction.op); }
void Actor::replicate_parameters() { refuse(Op::kReplicateParameters); }
void Actor::reduce_replicas() { refuse(Op::kReduceReplicas); }

void execute(const Program& program, Actor& actor, const Observer& observer) {
  execute(program, 0, program.size(), actor, observer);
}

void execute(const Program& program, size_t first, size_t last, Actor& actor,
             const Observer& observer) {
  for (size_t i = first; i < last; ++i) {
    const Instruction& instruction = program[i];
    const bool awaited_next =
        instruction.phase == Phase::kWhole ||
        (instruction.phase == Phase::kBegin && i + 1 < program.size() &&
         program[i + 1] == await(instruction));
    const double start = observer ? now() : 0;
    rank_context().doing = describe(instruction);
    try {
      run(instruction, awaited_next, actor);
    } catch (c10::Error& error) {
      error.add_context("while running " + describe(instruction));
      throw;
    }
    if (observer) observer(instruction, start, now());
  }
  rank_context().doing.clear();
}

}  // namespace tessera::program
