#include "tessera/program/detail/rules.h"

namespace tessera::program::detail {

GradientRules::GradientRules(const Units& units, Purpose purpose)
    : Rules(units, purpose) {}

void GradientRules::take(const Instruction& instruction) {
  take(instruction, steps_[instruction.version]);
}

void GradientRules::take(const Instruction& instruction, Step& step) {
  if (adds_gradients(instruction.op)) add(instruction, step);
  if (instruction.op == Op::kLoss && purpose_ == Purpose::kTraining) {
    require_room(instruction, step);
  }
  switch (instruction.op) {
    case Op::kZeroGradients:
      zero(instruction.version, step);
      break;
    case Op::kLoadInputs:
    case Op::kLoadDocuments:
    case Op::kForward:
      // The next batch goes forward before its gradients have a place.
      require(step.zeroed || purpose_ == Purpose::kEvaluation ||
                  instruction.version > ended_,
              "gradients are not zeroed yet");
      if (instruction.op != Op::kForward || !names_units()) break;
      for (int64_t id : reads(instruction)) {
        ++step.owners[id].forwards_of[instruction.microbatch];
      }
      break;
    case Op::kAllocateGradients: {
      require(unit_at(instruction.unit).zero_stage >= 2 && step.zeroed,
              "only gradients that live as shards are allocated");
      Owner& owner = step.owners[instruction.unit];
      require(!owner.allocated, "allocated already");
      owner.allocated = true;
      break;
    }
    case Op::kReduceGradients:
      reduce(instruction, step);
      break;
    case Op::kSumGradients:
      sum(instruction, step);
      break;
    case Op::kReduceReplicas:
      require(units_.devices > 1 && step.added && !step.gathered_replicas,
              "gradients come from the other devices once, complete");
      step.gathered_replicas = true;
      break;
    default:
      tail(instruction, step);
  }
}

// Where the gradients of some step before lay, which are used up.
void GradientRules::zero(int64_t version, Step& step) {
  require(!step.zeroed && !step.added, "gradients are zeroed once, first");
  require(version < ended_ + units_.versions.gradients,
          "gradients of the step before are still there");
  step.zeroed = true;
}

// For what it adds to gradients.
void GradientRules::require_room(const Instruction& instruction, Step& step) {
  require(step.zeroed, "gradients are not zeroed yet");
  require(!step.gathered_replicas, "behind the sum over devices");
  if (!names_units()) return;
  for (int64_t id : reads(instruction)) {
    const int64_t stage = unit_at(id).zero_stage;
    const Owner& owner = step.owners[id];
    require(stage < 2 || owner.allocated, "the gradients of unit ", id,
            " are not allocated");
    require(stage >= 2 || owner.reductions == 0, "the gradients of unit ", id,
            " were reduced already");
  }
}

void GradientRules::add(const Instruction& instruction, Step& step) {
  require_room(instruction, step);
  step.added = true;
  if (!names_units()) return;
  for (int64_t id : reads(instruction)) {
    Owner& owner = step.owners[id];
    ++owner.adds;
    ++owner.adds_of[instruction.microbatch];
    owner.added.insert(instruction.microbatch);
  }
}

void GradientRules::reduce(const Instruction& instruction, Step& step) {
  const Unit& unit = unit_at(instruction.unit);
  Owner& owner = step.owners[instruction.unit];
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

void GradientRules::sum(const Instruction& instruction, Step& step) {
  const Unit& unit = unit_at(instruction.unit);
  Owner& owner = step.owners[instruction.unit];
  require(unit.summed, "its shards have no replicas");
  require(owner.reduction == Progress::kDone && owner.adds == 0,
          "its reductions are not complete");
  advance(instruction, owner.sum, "summed twice");
}

void GradientRules::check_owner(int64_t id, const Owner& owner) {
  const Unit& unit = unit_at(id);
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

void GradientRules::norm(Step& step) {
  require(!step.normed, "the norm is taken once");
  require(step.added, "there is no micro-batch");
  require(units_.devices == 1 || step.gathered_replicas,
          "the gradients of the other devices are missing");
  if (names_units()) {
    for (int64_t id : owners_) check_owner(id, step.owners[id]);
  }
  step.normed = true;
}

void GradientRules::tail(const Instruction& instruction, Step& step) {
  switch (instruction.op) {
    case Op::kNorm:
      return norm(step);
    case Op::kSumNorm:
      require(step.normed, "behind the norm");
      return advance(instruction, step.sum_norm, "summed twice");
    case Op::kClipGradients:
    case Op::kGatherUpdates:
    case Op::kOptimizerStep: {
      const bool clips = instruction.op == Op::kClipGradients;
      require(step.normed && (units_.alone || step.sum_norm == Progress::kDone),
              "the norm is not known yet");
      require(!clips || (!step.clipped && !step.stepped),
              "clipped once, before the update");
      require(clips || names_units() || !step.stepped, "updated twice");
      (clips ? step.clipped : step.stepped) = true;
      return clips ? void() : update(instruction, step);
    }
    case Op::kNextVersion:
      return end_step(instruction.version, step);
    default:
      require(!step.normed || !is_compute(instruction.op), "behind the norm");
  }
}

void GradientRules::update(const Instruction& instruction, Step& step) {
  if (!names_units()) return;
  require_owner(instruction.unit);
  const bool is_whole = unit_at(instruction.unit).whole_updates;
  Owner& owner = step.owners[instruction.unit];
  if (instruction.op == Op::kGatherUpdates) {
    require(is_whole, "its updates need no others' pieces");
    return advance(instruction, owner.updates, "gathered twice");
  }
  require(!is_whole || owner.updates == Progress::kDone,
          "what it is updated by is not gathered yet");
}

void GradientRules::end_step(int64_t version, const Step& step) {
  require(step.stepped && version == ended_, "the step has no update");
  ++ended_;
}

void GradientRules::finish() {
  if (purpose_ == Purpose::kEvaluation) return;
  require(!steps_.empty(), "the program has no OptimizerStep");
  for (const auto& [version, step] : steps_) {
    require(step.stepped, "the program has no OptimizerStep");
    require(step.sum_norm != Progress::kUnderWay,
            "the norm's sum was left begun");
    require(units_.versions.parameters == 1 || version < ended_,
            "the step has no end");
  }
}

}  // namespace tessera::program::detail
