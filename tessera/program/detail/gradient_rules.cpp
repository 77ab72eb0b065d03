#include <algorithm>

#include "tessera/program/detail/rules.h"

namespace tessera::program::detail {

GradientRules::GradientRules(const Units& units, Purpose purpose)
    : Rules(units, purpose), owners_(units.all.size()) {}

void GradientRules::take(const Instruction& instruction) {
  if (adds_gradients(instruction.op)) add(instruction);
  if (instruction.op == Op::kLoss && purpose_ == Purpose::kTraining) {
    require_room(instruction);
  }
  switch (instruction.op) {
    case Op::kZeroGradients:
      require(!zeroed_ && !added_, "gradients are zeroed once, first");
      zeroed_ = true;
      break;
    case Op::kLoadInputs:
    case Op::kLoadDocuments:
    case Op::kForward:
      require(zeroed_ || purpose_ == Purpose::kEvaluation,
              "gradients are not zeroed yet");
      if (instruction.op != Op::kForward || !names_units()) break;
      for (int64_t id : reads(instruction)) {
        ++owners_[id].forwards_of[instruction.microbatch];
      }
      break;
    case Op::kAllocateGradients: {
      require(unit_at(instruction.unit).zero_stage >= 2 && zeroed_,
              "only gradients that live as shards are allocated");
      Owner& owner = owners_[instruction.unit];
      require(!owner.allocated, "allocated already");
      owner.allocated = true;
      break;
    }
    case Op::kReduceGradients:
      reduce(instruction);
      break;
    case Op::kSumGradients:
      sum(instruction);
      break;
    case Op::kReduceReplicas:
      require(units_.devices > 1 && added_ && !gathered_replicas_,
              "gradients come from the other devices once, complete");
      gathered_replicas_ = true;
      break;
    default:
      tail(instruction);
  }
}

// For what it adds to gradients.
void GradientRules::require_room(const Instruction& instruction) {
  require(zeroed_, "gradients are not zeroed yet");
  require(!gathered_replicas_, "behind the sum over devices");
  if (!names_units()) return;
  for (int64_t id : reads(instruction)) {
    const int64_t stage = unit_at(id).zero_stage;
    const Owner& owner = owners_[id];
    require(stage < 2 || owner.allocated, "the gradients of unit ", id,
            " are not allocated");
    require(stage >= 2 || owner.reductions == 0, "the gradients of unit ", id,
            " were reduced already");
  }
}

void GradientRules::add(const Instruction& instruction) {
  require_room(instruction);
  added_ = true;
  if (!names_units()) return;
  for (int64_t id : reads(instruction)) {
    ++owners_[id].adds;
    ++owners_[id].adds_of[instruction.microbatch];
    owners_[id].added.insert(instruction.microbatch);
  }
}

void GradientRules::reduce(const Instruction& instruction) {
  const Unit& unit = unit_at(instruction.unit);
  Owner& owner = owners_[instruction.unit];
  require(unit.reduced, "nobody shares these gradients");
  // A micro-batch's is behind the one before.
  if (begins(instruction) && owner.reduction == Progress::kDone) {
    owner.reduction = Progress::kNone;
  }
  advance(instruction, owner.reduction,
          "the reduction before it is still under way");
  if (begins(instruction)) {
    require(owner.adds > 0, "there is nothing new to reduce");
    require(unit.zero_stage >= 2 || owner.reductions == 0, "reduced twice");
    if (unit.zero_stage >= 2) {
      require(owner.added.contains(instruction.microbatch),
              "its micro-batch added nothing new");
      for (int64_t each : owner.added) {
        require(owner.adds_of[each] == owner.forwards_of[each],
                "a backward that adds to these gradients is still to come");
      }
      owner.joined += static_cast<int64_t>(owner.added.size()) - 1;
    }
    owner.added.clear();
    owner.adds = 0;
    owner.allocated = false;
    ++owner.reductions;
  }
}

void GradientRules::sum(const Instruction& instruction) {
  const Unit& unit = unit_at(instruction.unit);
  Owner& owner = owners_[instruction.unit];
  require(unit.summed, "its shards have no replicas");
  require(owner.reduction == Progress::kDone && owner.adds == 0,
          "its reductions are not complete");
  advance(instruction, owner.sum, "summed twice");
}

void GradientRules::check_owner(int64_t id) {
  const Unit& unit = unit_at(id);
  const Owner& owner = owners_[id];
  require(owner.reduction != Progress::kUnderWay, "the reduction of unit ", id,
          " is not awaited yet");
  require(!owner.allocated, "the gradients of unit ", id, " are still whole");
  const auto microbatches = static_cast<int64_t>(owner.adds_of.size());
  const int64_t due = !unit.reduced          ? 0
                      : unit.zero_stage >= 2 ? microbatches - owner.joined
                                             : 1;
  require(owner.reductions == due, "the gradients of unit ", id,
          " are reduced ", owner.reductions, " times, not ", due);
  require(!unit.reduced || owner.adds == 0, "the gradients of unit ", id,
          " were added to behind their reduction");
  require(!unit.summed || owner.sum == Progress::kDone, "the gradients of ",
          "unit ", id, " are not summed over their replicas");
}

void GradientRules::norm() {
  require(!normed_, "the norm is taken once");
  require(added_, "there is no micro-batch");
  require(units_.devices == 1 || gathered_replicas_,
          "the gradients of the other devices are missing");
  if (names_units()) {
    for (int64_t owner : units_.owners()) check_owner(owner);
  }
  normed_ = true;
}

void GradientRules::tail(const Instruction& instruction) {
  switch (instruction.op) {
    case Op::kNorm:
      return norm();
    case Op::kSumNorm:
      require(normed_, "behind the norm");
      return advance(instruction, sum_norm_, "summed twice");
    case Op::kClipGradients:
    case Op::kGatherUpdates:
    case Op::kOptimizerStep: {
      const bool clips = instruction.op == Op::kClipGradients;
      require(normed_ && (units_.alone || sum_norm_ == Progress::kDone),
              "the norm is not known yet");
      require(!clips || (!clipped_ && !stepped_),
              "clipped once, before the update");
      require(clips || names_units() || !stepped_, "updated twice");
      (clips ? clipped_ : stepped_) = true;
      return clips ? void() : update(instruction);
    }
    default:
      require(!normed_ || !is_compute(instruction.op), "behind the norm");
  }
}

void GradientRules::update(const Instruction& instruction) {
  if (!names_units()) return;
  const bool is_whole = unit_at(instruction.unit).whole_updates;
  Owner& owner = owners_[instruction.unit];
  if (instruction.op == Op::kGatherUpdates) {
    require(is_whole, "its updates need no others' pieces");
    return advance(instruction, owner.updates, "gathered twice");
  }
  require(!is_whole || owner.updates == Progress::kDone,
          "what it is updated by is not gathered yet");
}

void GradientRules::finish() {
  if (purpose_ == Purpose::kEvaluation) return;
  require(stepped_, "the program has no OptimizerStep");
  require(sum_norm_ != Progress::kUnderWay, "the norm's sum was left begun");
}

}  // namespace tessera::program::detail
