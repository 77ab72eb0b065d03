#include <algorithm>
#include <set>
#include <utility>

#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {
namespace {

class Recompute {
 public:
  Recompute(const Program& program, const Units& units)
      : program_(program), units_(units) {}

  Program run() {
    for (const auto& instruction : program_) {
      const bool is_backward = adds_gradients(instruction.op) ||
                               instruction.op == Op::kBackwardInput;
      if (is_backward && instruction.unit >= 0 && lacks(instruction)) {
        compute_again(instruction);
      }
      lowered_.push_back(instruction);
    }
    return std::move(lowered_);
  }

 private:
  bool lacks(const Instruction& backward) const {
    return units_.all[backward.unit].recomputed_from &&
           !done_.contains({backward.microbatch, backward.unit});
  }

  // The first backward of units that are computed again together is that of the
  // last of them.
  void compute_again(const Instruction& backward) {
    const auto& chunk = units_.chunks.at(backward.chunk);
    const int64_t from = *units_.all[backward.unit].recomputed_from;
    for (auto unit = std::ranges::find(chunk, from);; ++unit) {
      const bool is_last = *unit == backward.unit;
      const bool keeps = is_last || !units_.minimal;
      lowered_.push_back(backward);
      lowered_.back().unit = *unit;
      lowered_.back().op = keeps ? Op::kRecompute : Op::kReplay;
      if (keeps) done_.emplace(backward.microbatch, *unit);
      if (is_last) return;
    }
  }

  const Program& program_;
  const Units& units_;
  Program lowered_;
  std::set<std::pair<int64_t, int64_t>> done_;  // micro-batch, unit
};

}  // namespace

Program recompute(const Program& program, const Units& units) {
  if (units.chunks.empty()) return program;
  return Recompute(program, units).run();
}

}  // namespace tessera::program::passes
