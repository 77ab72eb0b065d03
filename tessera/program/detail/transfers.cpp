#include "tessera/program/detail/transfers.h"

namespace tessera::program::detail {
namespace {

// nullptr: none.
const std::vector<Transfer>* of_unit(const UnitTransfers& unit, Op op) {
  switch (op) {
    case Op::kGatherParameters:
      return &unit.gather;
    case Op::kReduceGradients:
      return &unit.reduce;
    case Op::kSumGradients:
      return &unit.sum;
    case Op::kGatherUpdates:
      return &unit.updates;
    case Op::kForward:
    case Op::kReplay:
      return &unit.forward;
    case Op::kRecompute:
      return &unit.again;
    case Op::kBackward:
    case Op::kBackwardInput:
      return &unit.backward;
    default:
      return nullptr;
  }
}

}  // namespace

const std::vector<Transfer>& transfers_of(const RankProgram& of,
                                          const Instruction& instruction) {
  static const std::vector<Transfer> none;
  if (instruction.phase == Phase::kAwait) return none;
  if (instruction.op == Op::kLoss) return of.loss;
  if (instruction.op == Op::kSumNorm) return of.norm;
  if (instruction.op == Op::kShareBatch) return of.batch;
  if (instruction.op == Op::kNextVersion) return of.between_steps;
  const auto unit = instruction.unit;
  if (unit < 0 || unit >= static_cast<int64_t>(of.units.size())) return none;
  const auto* const found = of_unit(of.units[unit], instruction.op);
  return found != nullptr ? *found : none;
}

int64_t bytes_of(const Instruction& instruction, const Transfer& transfer,
                 int64_t ranks) {
  const bool counts_pieces = instruction.op == Op::kGatherParameters ||
                             instruction.op == Op::kGatherUpdates;
  return transfer.elements * (counts_pieces ? ranks : 1) *
         static_cast<int64_t>(c10::elementSize(transfer.dtype));
}

}  // namespace tessera::program::detail
