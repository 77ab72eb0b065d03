#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {
namespace {

class Sharding {
 public:
  Sharding(const Program& program, const Units& units)
      : program_(program),
        units_(units),
        trains_(trains(program)),
        owners_(units.all.size()) {
    for (const auto& instruction : program) {
      if (!adds_gradients(instruction.op)) continue;
      for (int64_t owner : reads(instruction)) {
        ++owners_[owner].adds_left;
        ++owners_[owner].adds_left_of[instruction.microbatch];
      }
    }
  }

  Program run() {
    for (size_t i = 0; i < program_.size(); ++i) {
      const Instruction& instruction = program_[i];
      if (is_compute(instruction.op) || instruction.op == Op::kLoss) {
        compute(i);
      } else if (instruction.op == Op::kNorm) {
        complete_gradients();
        lowered_.push_back(instruction);
      } else if (instruction.op == Op::kOptimizerStep) {
        update();
      } else {
        lowered_.push_back(instruction);
      }
    }
    return std::move(lowered_);
  }

 private:
  struct Owner {
    bool gathered = false;   // from shards
    bool allocated = false;  // whole gradients, in stages 2 and 3
    int64_t adds_left = 0;   // backwards that add to its gradients
    std::map<int64_t, int64_t> adds_left_of = {};  // by micro-batch
    std::set<int64_t> added = {};  // micro-batches, since the last reduction
    std::map<int64_t, bool> entered = {};  // micro-batches that went forward
  };

  const std::vector<int64_t>& reads(const Instruction& instruction) const {
    return units_.all[instruction.unit].reads;
  }
  int64_t stage_of(int64_t owner) const { return units_.all[owner].zero_stage; }

  void push(Op op, int64_t owner, int64_t microbatch = -1) {
    lowered_.push_back({op, microbatch, owner});
  }

  void compute(size_t i) {
    const Instruction& instruction = program_[i];
    // A loss that is trained on adds to them before its backward does.
    const bool adds = adds_gradients(instruction.op) ||
                      (trains_ && instruction.op == Op::kLoss);
    for (int64_t owner : reads(instruction)) {
      if (reads_parameters(instruction.op)) gather(owner);
      if (adds) allocate(owner);
    }
    lowered_.push_back(instruction);
    // A forward and a backward each gather for themselves, as ZeRO-3 counts it.
    const bool goes_on =
        !trains_ || is_again(instruction.op) || instruction.op == Op::kLoss;
    const auto next = goes_on ? read_next(i) : std::vector<int64_t>();
    for (int64_t owner : reads(instruction)) {
      behind(instruction, owner);
      const bool is_next = std::ranges::count(next, owner) > 0;
      if (stage_of(owner) < 3 || is_next) continue;
      if (!stays(owner) || !is_awaited(owner)) free(owner);
    }
  }

  // What the next instruction reads that reads parameters.
  std::vector<int64_t> read_next(size_t i) const {
    for (++i; i < program_.size(); ++i) {
      if (reads_parameters(program_[i].op)) return reads(program_[i]);
    }
    return {};
  }

  void behind(const Instruction& instruction, int64_t owner) {
    Owner& state = owners_[owner];
    const int64_t m = instruction.microbatch;
    if (instruction.op == Op::kForward) state.entered[m] = true;
    if (!adds_gradients(instruction.op)) return;
    --state.adds_left_of[m];
    const bool last = --state.adds_left == 0;
    if (stage_of(owner) < 2) {
      if (last) reduce(owner, m);
      return;
    }
    state.added.insert(m);
    // What two units of this rank share they may add to in turn.
    const bool complete = std::ranges::all_of(state.added, [&](int64_t each) {
      return state.adds_left_of[each] == 0;
    });
    if (complete) reduce(owner, m);
  }

  bool stays(int64_t owner) const {
    return !units_.reshard_after_forward || units_.readers_of(owner).size() > 1;
  }

  // Some micro-batch is between its forward and its last backward.
  bool is_awaited(int64_t owner) const {
    const Owner& state = owners_[owner];
    return std::ranges::any_of(state.entered, [&](const auto& each) {
      const auto left = state.adds_left_of.find(each.first);
      return left != state.adds_left_of.end() && left->second > 0;
    });
  }

  void gather(int64_t owner) {
    if (stage_of(owner) == 0 || owners_[owner].gathered) return;
    owners_[owner].gathered = true;
    push(Op::kGatherParameters, owner);
  }

  void free(int64_t owner) {
    if (!owners_[owner].gathered) return;
    owners_[owner].gathered = false;
    push(Op::kFreeParameters, owner);
  }

  void allocate(int64_t owner) {
    if (stage_of(owner) < 2 || owners_[owner].allocated) return;
    owners_[owner].allocated = true;
    push(Op::kAllocateGradients, owner);
  }

  // Ranks of other stages are still in the middle of their programs: what they
  // take part in is left to the end.
  void reduce(int64_t owner, int64_t microbatch) {
    owners_[owner].allocated = false;
    owners_[owner].added.clear();
    if (!units_.all[owner].reduced || units_.all[owner].across_stages) return;
    push(Op::kReduceGradients, owner, stage_of(owner) >= 2 ? microbatch : -1);
  }

  void complete_gradients() {
    for (int64_t owner : units_.owners()) {
      const Unit& unit = units_.all[owner];
      if (unit.across_stages && unit.reduced) {
        push(Op::kReduceGradients, owner);
      }
    }
    for (int64_t owner : units_.owners()) {
      if (units_.all[owner].summed) push(Op::kSumGradients, owner);
    }
  }

  void update() {
    for (int64_t owner : units_.owners()) {
      if (units_.all[owner].whole_updates) push(Op::kGatherUpdates, owner);
      push(Op::kOptimizerStep, owner);
    }
  }

  const Program& program_;
  const Units& units_;
  const bool trains_;
  Program lowered_;
  std::vector<Owner> owners_;  // by unit
};

}  // namespace

Program sharding(const Program& program, const Units& units) {
  if (units.chunks.empty()) return program;
  return Sharding(program, units).run();
}

}  // namespace tessera::program::passes
