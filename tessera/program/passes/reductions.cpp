#include <functional>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {
namespace {

bool is(const Instruction& each, Op op, Phase phase) {
  return each.op == op && each.phase == phase;
}

// Awaits that are put off until something needs what they wait for.
class PutOff {
 public:
  PutOff(const Program& program, const Units& units)
      : program_(program), units_(units) {
    // What other stages take part in may begin behind its last backward.
    for (size_t i = 0; i < program.size(); ++i) {
      if (!adds_gradients(program[i].op)) continue;
      for (int64_t owner : units.all[program[i].unit].reads) {
        const Unit& unit = units.all[owner];
        if (!unit.across_stages || !unit.reduced) continue;
        last_add_[{-program[i].version, owner}] = i;
      }
    }
  }

  Program run() {
    for (size_t i = 0; i < program_.size(); ++i) {
      const Instruction& each = program_[i];
      if (is(each, Op::kReduceGradients, Phase::kBegin)) {
        if (units_.all[each.unit].across_stages) continue;  // it began
        if (in_shards(each.unit)) flush(into_shards_);
      }
      if (each.op == Op::kNorm || each.op == Op::kSumGradients) {
        flush(into_shards_);
        flush(whole_);
      }
      if (is(each, Op::kReduceGradients, Phase::kAwait)) {
        (in_shards(each.unit) ? into_shards_ : whole_).push_back(each);
        continue;
      }
      lowered_.push_back(each);
      begin_across_stages(i);
    }
    return std::move(lowered_);
  }

 private:
  // One at a time is under way where gradients live as shards: more would hold
  // what the shards are to save.
  bool in_shards(int64_t unit) const {
    return units_.all[unit].zero_stage >= 2;
  }

  // In one order on all stages, which come to their last backwards in others.
  void begin_across_stages(size_t i) {
    while (!last_add_.empty() && last_add_.begin()->second <= i) {
      const auto [version, owner] = last_add_.begin()->first;
      lowered_.push_back({.op = Op::kReduceGradients,
                          .unit = owner,
                          .phase = Phase::kBegin,
                          .version = -version});
      last_add_.erase(last_add_.begin());
    }
  }

  void flush(Program& awaits) {
    for (const auto& each : std::exchange(awaits, {})) lowered_.push_back(each);
  }

  const Program& program_;
  const Units& units_;
  Program lowered_;
  // By version, counted down, and owner, from the last on, of those that wait
  // for it.
  std::map<std::pair<int64_t, int64_t>, size_t, std::greater<>> last_add_;
  Program into_shards_, whole_;
};

}  // namespace

Program reductions(const Program& program, const Units& units) {
  if (units.chunks.empty()) return program;
  return PutOff(program, units).run();
}

}  // namespace tessera::program::passes
