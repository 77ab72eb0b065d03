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
      : program_(program), units_(units), trains_(trains(program)) {
    for (const auto& instruction : program) {
      if (!adds_gradients(instruction.op)) continue;
      for (int64_t owner : reads(instruction)) {
        Owner& state = at(owner, instruction.version);
        ++state.adds_left;
        ++state.adds_left_of[instruction.microbatch];
      }
    }
  }

  Program run() {
    for (size_t i = 0; i < program_.size(); ++i) {
      const Instruction& instruction = program_[i];
      if (is_compute(instruction.op) || instruction.op == Op::kLoss) {
        compute(i);
      } else if (instruction.op == Op::kNorm) {
        complete_gradients(instruction.version);
        lowered_.push_back(instruction);
      } else if (instruction.op == Op::kOptimizerStep) {
        update(instruction.version);
      } else if (instruction.op != Op::kKeepParameters) {
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

  Owner& at(int64_t owner, int64_t version) {
    return owners_[{owner, version}];
  }

  void push(Op op, int64_t owner, int64_t version, int64_t microbatch = -1) {
    lowered_.push_back({.op = op,
                        .microbatch = microbatch,
                        .unit = owner,
                        .version = version});
  }

  void compute(size_t i) {
    const Instruction& instruction = program_[i];
    // A loss that is trained on adds to them before its backward does.
    const bool adds = adds_gradients(instruction.op) ||
                      (trains_ && instruction.op == Op::kLoss);
    for (int64_t owner : reads(instruction)) {
      if (reads_parameters(instruction.op)) gather(owner, instruction.version);
      if (adds) allocate(owner, instruction.version);
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
      if (!stays(owner) || !is_awaited(at(owner, instruction.version))) {
        free(owner, instruction.version);
      }
    }
  }

  // What the next instruction reads that reads parameters, of this version.
  std::vector<int64_t> read_next(size_t i) const {
    const int64_t version = program_[i].version;
    for (++i; i < program_.size(); ++i) {
      if (!reads_parameters(program_[i].op)) continue;
      if (program_[i].version == version) return reads(program_[i]);
      break;
    }
    return {};
  }

  void behind(const Instruction& instruction, int64_t owner) {
    Owner& state = at(owner, instruction.version);
    const int64_t m = instruction.microbatch;
    if (instruction.op == Op::kForward) state.entered[m] = true;
    if (!adds_gradients(instruction.op)) return;
    --state.adds_left_of[m];
    const bool last = --state.adds_left == 0;
    if (stage_of(owner) < 2) {
      if (last) reduce(owner, instruction.version, m);
      return;
    }
    state.added.insert(m);
    // What two units of this rank share they may add to in turn.
    const bool complete = std::ranges::all_of(state.added, [&](int64_t each) {
      return state.adds_left_of[each] == 0;
    });
    if (complete) reduce(owner, instruction.version, m);
  }

  bool stays(int64_t owner) const {
    return !units_.reshard_after_forward || units_.readers_of(owner).size() > 1;
  }

  // Some micro-batch is between its forward and its last backward.
  static bool is_awaited(const Owner& state) {
    return std::ranges::any_of(state.entered, [&](const auto& each) {
      const auto left = state.adds_left_of.find(each.first);
      return left != state.adds_left_of.end() && left->second > 0;
    });
  }

  void gather(int64_t owner, int64_t version) {
    if (stage_of(owner) == 0 || at(owner, version).gathered) return;
    at(owner, version).gathered = true;
    push(Op::kGatherParameters, owner, version);
  }

  void free(int64_t owner, int64_t version) {
    if (!std::exchange(at(owner, version).gathered, false)) return;
    push(Op::kFreeParameters, owner, version);
  }

  void allocate(int64_t owner, int64_t version) {
    if (stage_of(owner) < 2 || at(owner, version).allocated) return;
    at(owner, version).allocated = true;
    push(Op::kAllocateGradients, owner, version);
  }

  // Ranks of other stages are still in the middle of their programs: what they
  // take part in is left to the end.
  void reduce(int64_t owner, int64_t version, int64_t microbatch) {
    at(owner, version).allocated = false;
    at(owner, version).added.clear();
    if (!units_.all[owner].reduced || units_.all[owner].across_stages) return;
    push(Op::kReduceGradients, owner, version,
         stage_of(owner) >= 2 ? microbatch : -1);
  }

  void complete_gradients(int64_t version) {
    for (int64_t owner : units_.owners()) {
      const Unit& unit = units_.all[owner];
      if (unit.across_stages && unit.reduced) {
        push(Op::kReduceGradients, owner, version);
      }
    }
    for (int64_t owner : units_.owners()) {
      if (units_.all[owner].summed) push(Op::kSumGradients, owner, version);
    }
  }

  void update(int64_t version) {
    const bool keeps = units_.versions.parameters > 1;
    for (int64_t owner : units_.owners()) {
      const Unit& unit = units_.all[owner];
      if (unit.whole_updates) push(Op::kGatherUpdates, owner, version);
      if (keeps) push(Op::kKeepParameters, owner, version);
      push(Op::kOptimizerStep, owner, version);
    }
  }

  const Program& program_;
  const Units& units_;
  const bool trains_;
  Program lowered_;
  std::map<std::pair<int64_t, int64_t>, Owner> owners_;  // by unit, version
};

}  // namespace

Program sharding(const Program& program, const Units& units) {
  if (units.chunks.empty()) return program;
  return Sharding(program, units).run();
}

}  // namespace tessera::program::passes
