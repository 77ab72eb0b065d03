#include "tessera/engine/recorder.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/comm/group.h"
#include "tessera/engine/wire.h"

namespace tessera::engine {
namespace {

using monitor::SpanKind;
using program::Instruction;
using program::Op;
using program::Phase;

enum Lane {
  kCompute = monitor::kComputeLane,
  kGathers,
  kReductions,
  kMessages,
  kFiles,
  kBatches
};

std::optional<SpanKind> kind_of_op(Op op) {
  switch (op) {
    case Op::kForward:
      return SpanKind::kForward;
    case Op::kRecompute:
    case Op::kReplay:
      return SpanKind::kRecompute;
    case Op::kLoss:
      return SpanKind::kLoss;
    case Op::kBackward:
    case Op::kBackwardInput:
    case Op::kBackwardWeight:
      return SpanKind::kBackward;
    case Op::kLoadInputs:
    case Op::kLoadTargets:
    case Op::kLoadDocuments:
      return SpanKind::kLoad;
    case Op::kShareBatch:
      return SpanKind::kBatch;
    case Op::kGatherParameters:
    case Op::kGatherUpdates:
    case Op::kReplicateParameters:
      return SpanKind::kGather;
    case Op::kReduceGradients:
    case Op::kSumGradients:
    case Op::kReduceReplicas:
      return SpanKind::kReduce;
    case Op::kSendActivations:
    case Op::kReceiveActivations:
    case Op::kSendGradients:
    case Op::kReceiveGradients:
      return SpanKind::kMessage;
    case Op::kNorm:
    case Op::kSumNorm:
      return SpanKind::kNorm;
    case Op::kClipGradients:
    case Op::kKeepParameters:
    case Op::kOptimizerStep:
      return SpanKind::kOptimizer;
    case Op::kFetchStates:
    case Op::kFetchParameters:
      return SpanKind::kOffload;
    case Op::kZeroGradients:
    case Op::kNextVersion:
    case Op::kHandActivations:
    case Op::kHandGradients:
    case Op::kFreeParameters:
    case Op::kAllocateGradients:
    case Op::kReleaseStates:
    case Op::kReleaseParameters:
      return std::nullopt;
  }
  TORCH_INTERNAL_ASSERT(false, "an op of no kind");
}

int64_t lane_of(SpanKind kind) {
  return kind == SpanKind::kGather    ? kGathers
         : kind == SpanKind::kMessage ? kMessages
         : kind == SpanKind::kOffload ? kFiles
         : kind == SpanKind::kBatch   ? kBatches
                                      : kReductions;
}

}  // namespace

Instruction Recorder::in_step(Instruction instruction) const {
  if (instruction.microbatch >= 0) {
    instruction.microbatch %= num_microbatches_;
  }
  return instruction;
}

void Recorder::name_operands(const Instruction& of, monitor::Span& span) const {
  const Instruction instruction = in_step(of);
  span.args.emplace_back("step", step_ + of.version);
  if (instruction.microbatch >= 0) {
    span.args.emplace_back("microbatch", instruction.microbatch);
  }
  if (instruction.unit >= 0) span.args.emplace_back("unit", instruction.unit);
  if (instruction.chunk > 0) span.args.emplace_back("chunk", instruction.chunk);
}

// What stages sum together waits for them, as a message does.
std::optional<SpanKind> Recorder::kind_of(
    const Instruction& instruction) const {
  const auto& units = composed_.units.all;
  if (instruction.op == Op::kReduceGradients && instruction.unit >= 0 &&
      units.at(instruction.unit).across_stages) {
    return SpanKind::kMessage;
  }
  return kind_of_op(instruction.op);
}

Recorder::Recorder(const parallel::Composed& composed, int64_t rank)
    : composed_(composed), rank_(rank) {}

std::vector<std::string> Recorder::lanes() {
  return {"compute", "gathers", "reductions", "messages", "files", "batches"};
}

void Recorder::begin_step(int64_t step, int64_t num_microbatches) {
  step_ = step;
  num_microbatches_ = num_microbatches;
  spans_.clear();
  begun_.clear();
  lane_end_.clear();
  blocked_s_ = comm::seconds_blocked();
}

program::Observer Recorder::observer() {
  return [this](const Instruction& instruction, double begin_s, double end_s) {
    take(instruction, begin_s, end_s);
  };
}

void Recorder::take(const Instruction& instruction, double begin_s,
                    double end_s) {
  const auto kind = kind_of(instruction);
  if (!kind) return;
  monitor::Span span{.name = program::describe(instruction),
                     .kind = *kind,
                     .begin_s = begin_s,
                     .end_s = end_s};
  const double blocked_s = comm::seconds_blocked();
  const double inside_s = blocked_s - std::exchange(blocked_s_, blocked_s);
  // Who reads a batch does so before it goes off.
  const bool reads =
      instruction.op == Op::kShareBatch && instruction.phase == Phase::kBegin;
  if (reads) span.kind = SpanKind::kLoad;
  if (!reads && (program::is_communication(instruction.op) ||
                 program::is_fetch(instruction.op))) {
    span.kind = SpanKind::kWait;
    span.awaited = *kind;
  } else {
    span.waited_s = inside_s;
  }
  if (instruction.phase == Phase::kAwait) {
    add_in_flight(instruction, end_s);
  } else if (instruction.phase == Phase::kBegin) {
    begun_[{instruction.op, instruction.microbatch, instruction.unit,
            instruction.chunk}] = begin_s;
  }
  name_operands(instruction, span);
  if (program::is_message(instruction.op)) mark_message(instruction, span);
  spans_.push_back(std::move(span));
}

// What is under way at once on one lane is drawn one behind the other.
void Recorder::add_in_flight(const Instruction& instruction, double end_s) {
  const auto begun = begun_.extract({instruction.op, instruction.microbatch,
                                     instruction.unit, instruction.chunk});
  if (begun.empty()) return;
  const SpanKind kind = *kind_of(instruction);
  monitor::Span span{.name = program::name_of(instruction.op),
                     .kind = kind,
                     .lane = lane_of(kind),
                     .begin_s = begun.mapped(),
                     .end_s = end_s};
  double& last = lane_end_[span.lane];
  span.begin_s = std::max(span.begin_s, last);
  last = end_s;
  name_operands(instruction, span);
  spans_.push_back(std::move(span));
}

// From where its send begins to where its receive is awaited: the times at
// which the rank itself has to do with it.
void Recorder::mark_message(const Instruction& message,
                            monitor::Span& span) const {
  const Wire wire = wire_of(composed_, in_step(message));
  const int64_t step = step_ + message.version;
  if (message.phase == (wire.sends ? Phase::kAwait : Phase::kBegin)) return;
  const int64_t peer = composed_.pipeline->ranks().at(wire.peer);
  span.flow = wire.sends ? monitor::flow_id(step, rank_, peer, wire.tag)
                         : monitor::flow_id(step, peer, rank_, wire.tag);
  span.starts_flow = wire.sends;
}

}  // namespace tessera::engine
