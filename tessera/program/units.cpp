#include "tessera/program/units.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

namespace tessera::program {
namespace {

class Lowering {
 public:
  Lowering(const Program& program, const Units& units)
      : program_(program),
        units_(units),
        gathered_(units.reads.size(), false),
        alive_(units.chunks.size(), 0),
        backwards_left_(units.reads.size(), 0) {
    for (const auto& instruction : program) {
      if (instruction.op != Op::kBackward) continue;
      for (int64_t unit : units.chunks.at(instruction.chunk)) {
        for (int64_t owner : units.reads[unit]) ++backwards_left_[owner];
      }
    }
  }

  Program run() {
    for (const auto& instruction : program_) {
      TORCH_INTERNAL_ASSERT(instruction.unit < 0, "a program of whole chunks");
      switch (instruction.op) {
        case Op::kForward:
          forward(instruction);
          break;
        case Op::kBackward:
          backward(instruction);
          break;
        default:
          lowered_.push_back(instruction);
      }
      if (instruction.op == Op::kOptimizerStep) publish();
    }
    return std::move(lowered_);
  }

 private:
  void forward(const Instruction& whole) {
    ++alive_[whole.chunk];
    for (int64_t unit : units_.chunks[whole.chunk]) {
      gather_for(unit);
      push(whole, unit);
      for (int64_t owner : units_.reads[unit]) {
        if (!stays(owner)) free(owner);
      }
    }
  }

  void backward(const Instruction& whole) {
    --alive_[whole.chunk];
    const auto& units = units_.chunks[whole.chunk];
    for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
      gather_for(*unit);
      push(whole, *unit);
      for (int64_t owner : units_.reads[*unit]) behind_backward(owner, *unit);
    }
  }

  void behind_backward(int64_t owner, int64_t unit) {
    // The unit whose backward is the micro-batch's last for these gradients.
    const bool complete = units_.readers_of(owner).front() == unit;
    const bool last = --backwards_left_[owner] == 0;
    if (units_.zero_stages[owner] >= 2 ? complete : last) {
      lowered_.push_back({Op::kReduceGradients, -1, owner});
    }
    // What stays is freed behind its last backward, unless a micro-batch
    // between its forward and its backward still waits for it.
    if (!stays(owner) || (complete && !is_awaited(owner))) free(owner);
  }

  void push(const Instruction& whole, int64_t unit) {
    lowered_.push_back(whole);
    lowered_.back().unit = unit;
  }

  bool is_awaited(int64_t owner) const {
    for (size_t chunk = 0; chunk < alive_.size(); ++chunk) {
      if (alive_[chunk] == 0) continue;
      for (int64_t unit : units_.chunks[chunk]) {
        if (std::ranges::count(units_.reads[unit], owner) > 0) return true;
      }
    }
    return false;
  }

  bool stays(int64_t owner) const {
    return !units_.reshard_after_forward || units_.readers_of(owner).size() > 1;
  }

  void gather_for(int64_t unit) {
    for (int64_t owner : units_.reads[unit]) {
      if (units_.zero_stages[owner] < 3 || gathered_[owner]) continue;
      gathered_[owner] = true;
      lowered_.push_back({Op::kGatherParameters, -1, owner});
    }
  }

  void free(int64_t owner) {
    if (!gathered_[owner]) return;
    gathered_[owner] = false;
    lowered_.push_back({Op::kFreeParameters, -1, owner});
  }

  // Every rank has updated its shard.
  void publish() {
    for (int64_t owner : units_.owners()) {
      const int64_t stage = units_.zero_stages[owner];
      if (stage != 1 && stage != 2) continue;
      lowered_.push_back({Op::kGatherParameters, -1, owner});
    }
  }

  const Program& program_;
  const Units& units_;
  Program lowered_;
  std::vector<bool> gathered_;  // by unit, in stage 3
  std::vector<int64_t> alive_;  // by chunk: between forward and backward
  std::vector<int64_t> backwards_left_;  // by unit: that read its parameters
};

}  // namespace

std::vector<int64_t> Units::readers_of(int64_t unit) const {
  std::vector<int64_t> readers;
  for (const auto& chunk : chunks) {
    for (int64_t reader : chunk) {
      if (std::ranges::count(reads[reader], unit) > 0) {
        readers.push_back(reader);
      }
    }
  }
  std::ranges::sort(readers);
  return readers;
}

std::vector<int64_t> Units::owners() const {
  std::set<int64_t> owners;
  for (const auto& chunk : chunks) {
    for (int64_t unit : chunk) {
      owners.insert(reads[unit].begin(), reads[unit].end());
    }
  }
  return {owners.begin(), owners.end()};
}

Program over_units(const Program& program, const Units& units) {
  return Lowering(program, units).run();
}

}  // namespace tessera::program
