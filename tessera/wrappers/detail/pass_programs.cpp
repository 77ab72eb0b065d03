#include "tessera/wrappers/detail/pass_programs.h"

#include <algorithm>

#include "tessera/program/passes/pass.h"
#include "tessera/program/schedules/schedule.h"

namespace tessera::wrappers {

using program::Instruction;
using program::Op;
using program::Phase;
using program::Program;

namespace {

program::Units units_of(std::vector<program::Unit> owners,
                        const std::vector<int64_t>& visits,
                        const PassOptions& options) {
  program::Units units;
  units.reshard_after_forward = options.reshard_after_forward;
  units.prefetch = options.prefetch;
  units.alone = options.alone;
  for (size_t owner = 0; owner < owners.size(); ++owner) {
    owners[owner].reads = {static_cast<int64_t>(owner)};
    units.all.push_back(std::move(owners[owner]));
  }
  units.chunks.emplace_back();
  const auto visit = [&](std::vector<int64_t> reads) {
    units.chunks[0].push_back(static_cast<int64_t>(units.all.size()));
    units.all.push_back({.reads = std::move(reads), .reduced = false});
  };
  for (int64_t owner : visits) visit({0, owner});
  if (visits.empty()) visit({0});
  return units;
}

// What the module's own code does not do.
bool is_ours(const Instruction& each) {
  switch (each.op) {
    case Op::kGatherParameters:
    case Op::kFreeParameters:
    case Op::kAllocateGradients:
    case Op::kReduceGradients:
    case Op::kSumGradients:
      return true;
    default:
      return false;
  }
}

Program ours(Program::const_iterator first, Program::const_iterator last) {
  Program program;
  std::copy_if(first, last, std::back_inserter(program), is_ours);
  return program;
}

// Behind the last forward and what it frees.
Program::const_iterator end_of_forward(const Program& program) {
  auto end = program.end();
  while (end != program.begin() && (end - 1)->op != Op::kForward) --end;
  while (end != program.end() && end->op == Op::kFreeParameters) ++end;
  return end;
}

// A gather that a forward began for the backward is the backward's.
void hand_over_gathers(Program& forward, Program& backward) {
  Program kept, begun;
  for (auto each = forward.begin(); each != forward.end(); ++each) {
    const bool is_awaited =
        each->phase != Phase::kBegin ||
        std::find(each, forward.end(), program::await(*each)) != forward.end();
    (is_awaited ? kept : begun).push_back(*each);
  }
  forward = std::move(kept);
  backward.insert(backward.begin(), begun.begin(), begun.end());
}

std::vector<bool> held_behind(const Program& forward, size_t owners) {
  std::vector<bool> held(owners);
  for (const auto& each : forward) {
    if (each.op == Op::kGatherParameters) held[each.unit] = true;
    if (each.op == Op::kFreeParameters) held[each.unit] = false;
  }
  return held;
}

}  // namespace

PassPrograms pass_programs(std::vector<program::Unit> owners,
                           const std::vector<int64_t>& visits,
                           const PassOptions& options) {
  namespace schedules = program::schedules;
  const program::Units units = units_of(std::move(owners), visits, options);
  const size_t num_owners = units.all.size() - units.chunks[0].size();
  const Program step = program::passes::lower(
      schedules::step(schedules::named("1f1b"), {}, /*stage=*/0,
                      {.clip = false, .alone = units.alone}),
      units);
  const Program evaluation =
      program::passes::lower(schedules::evaluation({}, /*stage=*/0), units,
                             program::Purpose::kEvaluation);

  PassPrograms programs;
  const auto middle = end_of_forward(step);
  const auto end = std::ranges::find(step, Op::kNorm, &Instruction::op);
  programs.forward = ours(step.begin(), middle);
  Program backward = ours(middle, end);
  hand_over_gathers(programs.forward, backward);
  programs.held = held_behind(programs.forward, num_owners);
  for (const auto& each : backward) {
    const bool once =
        each.op == Op::kSumGradients || (each.op == Op::kReduceGradients &&
                                         units.all[each.unit].zero_stage < 2);
    (once ? programs.completion : programs.backward).push_back(each);
  }
  programs.evaluation = ours(evaluation.begin(), evaluation.end());
  return programs;
}

}  // namespace tessera::wrappers
