#include <algorithm>

#include "tessera/program/detail/rules.h"

namespace tessera::program::detail {

ParameterRules::ParameterRules(const Units& units, Purpose purpose)
    : Rules(units, purpose), stepped_(units.all.size(), false) {
  for (const auto& unit : units.all) {
    whole_.push_back(unit.zero_stage == 0 ? Progress::kDone : Progress::kNone);
  }
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
  if (!names_units()) return;
  if (reads_parameters(instruction.op)) {
    for (int64_t owner : reads(instruction)) {
      require(whole_[owner] == Progress::kDone, "the parameters of unit ",
              owner,
              whole_[owner] == Progress::kNone ? " are not gathered"
                                               : " are still on their way");
    }
  }
  switch (instruction.op) {
    case Op::kGatherParameters:
      return gather(instruction);
    case Op::kFreeParameters:
      require(unit_at(instruction.unit).zero_stage == 3,
              "only stage 3 frees parameters");
      require(whole_[instruction.unit] == Progress::kDone,
              whole_[instruction.unit] == Progress::kNone
                  ? "not gathered"
                  : "freed while on their way");
      whole_[instruction.unit] = Progress::kNone;
      --now_gathered_;
      return;
    case Op::kOptimizerStep: {
      const int64_t stage = unit_at(instruction.unit).zero_stage;
      require(!stepped_[instruction.unit], "updated twice");
      stepped_[instruction.unit] = true;
      // Of what lives whole every rank updated its shard alone.
      Progress& state = whole_[instruction.unit];
      require(state != Progress::kUnderWay, "updated while on its way");
      if (stage == 1 || stage == 2) state = Progress::kNone;
      return;
    }
    default:
      return;
  }
}

void ParameterRules::gather(const Instruction& instruction) {
  const int64_t stage = unit_at(instruction.unit).zero_stage;
  require(stage > 0, "stage 0 has nothing to gather");
  Progress& state = whole_[instruction.unit];
  advance(instruction, state, "gathered already");
  if (begins(instruction)) {
    require(!stepped_[instruction.unit], "gathered behind its update");
    ++gathers_;
    if (stage == 3) peak_gathered_ = std::max(peak_gathered_, ++now_gathered_);
  }
}

void ParameterRules::finish() {
  require(units_.devices == 1 || replicated_,
          "the other devices have no parameters");
  for (int64_t owner : units_.owners()) {
    require(whole_[owner] != Progress::kUnderWay, "the gather of unit ", owner,
            " was left begun");
    require(unit_at(owner).zero_stage < 3 || whole_[owner] == Progress::kNone,
            "the parameters of unit ", owner, " stay gathered");
    require(purpose_ == Purpose::kEvaluation || stepped_[owner], "unit ", owner,
            " is not updated");
  }
}

}  // namespace tessera::program::detail
