#include <algorithm>

#include "tessera/program/detail/rules.h"

namespace tessera::program::detail {

ParameterRules::ParameterRules(const Units& units, Purpose purpose)
    : Rules(units, purpose) {}

Progress& ParameterRules::whole(int64_t unit, int64_t version) {
  const bool always = unit_at(unit).zero_stage == 0;
  return whole_
      .try_emplace({unit, version}, always ? Progress::kDone : Progress::kNone)
      .first->second;
}

// The one that an update will write over is the oldest.
void ParameterRules::require_alive(int64_t unit, int64_t version) {
  const int64_t oldest = updates_[unit];
  require(version >= oldest, "version ", version, " of unit ", unit,
          " was written over");
  require(version < oldest + units_.versions.parameters, "version ", version,
          " of unit ", unit, " is not there yet");
}

void ParameterRules::take(const Instruction& instruction) {
  if (instruction.op == Op::kReplicateParameters) {
    require(units_.devices > 1 && !replicated_ && !computed_,
            "parameters go to the other devices once, first");
    replicated_ = true;
  }
  if (is_compute(instruction.op)) {
    require(units_.devices == 1 || replicated_,
            "the other devices have no parameters yet");
    computed_ = true;
  }
  if (instruction.op == Op::kNextVersion) end_step(instruction.version);
  const bool updates = instruction.op == Op::kKeepParameters ||
                       instruction.op == Op::kOptimizerStep;
  if (updates) return update(instruction);
  if (!names_units()) return;
  if (reads_parameters(instruction.op)) return read(instruction);
  switch (instruction.op) {
    case Op::kGatherParameters:
      return gather(instruction);
    case Op::kFreeParameters: {
      require(unit_at(instruction.unit).zero_stage == 3,
              "only stage 3 frees parameters");
      Progress& state = whole(instruction.unit, instruction.version);
      require(state == Progress::kDone, state == Progress::kNone
                                            ? "not gathered"
                                            : "freed while on their way");
      state = Progress::kNone;
      --now_gathered_;
      return;
    }
    default:
      return;
  }
}

void ParameterRules::read(const Instruction& instruction) {
  for (int64_t owner : reads(instruction)) {
    const Progress state = whole(owner, instruction.version);
    require(state == Progress::kDone, "the parameters of unit ", owner,
            state == Progress::kNone ? " are not gathered"
                                     : " are still on their way");
    require_alive(owner, instruction.version);
  }
}

void ParameterRules::gather(const Instruction& instruction) {
  require_owner(instruction.unit);
  const int64_t stage = unit_at(instruction.unit).zero_stage;
  require(stage > 0, "stage 0 has nothing to gather");
  Progress& state = whole(instruction.unit, instruction.version);
  advance(instruction, state, "gathered already");
  if (begins(instruction)) {
    require(updates_[instruction.unit] <= instruction.version,
            "gathered behind its update");
    require_alive(instruction.unit, instruction.version);
    ++gathers_;
    if (stage == 3) peak_gathered_ = std::max(peak_gathered_, ++now_gathered_);
  }
}

// Of what lives whole every rank updates its shard alone.
void ParameterRules::update(const Instruction& instruction) {
  const int64_t unit = instruction.unit, version = instruction.version;
  if (names_units()) require_owner(unit);
  const bool is_kept = kept_.contains(unit);
  if (instruction.op == Op::kKeepParameters) {
    require(units_.versions.parameters > 1, "there is one version");
    require(!is_kept && version == updates_[unit],
            "kept once, right before its update");
    kept_.insert(unit);
    return;
  }
  require(!names_units() || version == updates_[unit], "updated twice");
  require(units_.versions.parameters == 1 || is_kept,
          "what the next batch reads would be written over");
  kept_.erase(unit);
  ++updates_[unit];
  if (!names_units()) return;
  const int64_t stage = unit_at(unit).zero_stage;
  Progress& state = whole(unit, version);
  require(state != Progress::kUnderWay, "updated while on its way");
  if (stage == 1 || stage == 2) state = Progress::kNone;
}

void ParameterRules::end_step(int64_t version) {
  require(units_.versions.parameters > 1, "there is one version");
  require(version == ended_, "the step ended already");
  ++ended_;
  if (!names_units()) {
    require(updates_[-1] == ended_, "the step has no update");
    return;
  }
  for (int64_t owner : owners_) {
    require(updates_[owner] == ended_, "unit ", owner, " is not updated");
  }
}

void ParameterRules::finish() {
  require(units_.devices == 1 || replicated_,
          "the other devices have no parameters");
  if (!names_units()) return;
  for (const auto& [which, state] : whole_) {
    const auto [owner, version] = which;
    require(state != Progress::kUnderWay, "the gather of unit ", owner,
            " was left begun");
    require(unit_at(owner).zero_stage < 3 || state == Progress::kNone,
            "the parameters of unit ", owner, " stay gathered");
  }
  for (int64_t owner : owners_) {
    require(purpose_ == Purpose::kEvaluation || updates_[owner] > 0, "unit ",
            owner, " is not updated");
  }
}

}  // namespace tessera::program::detail
