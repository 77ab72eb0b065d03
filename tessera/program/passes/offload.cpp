#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {
namespace {

class Offload {
 public:
  Offload(const Program& program, const Units& units)
      : program_(program),
        before_(program.size()),
        begun_(program.size()),
        behind_(program.size()) {
    for (const auto& each : program) {
      needs_.push_back(fetched_for(each, units));
    }
  }

  Program run() {
    for (size_t i = 0; i < program_.size(); ++i) {
      if (!is_work(i)) continue;
      for (const Instruction& each : needs_[i]) {
        if (std::ranges::count(held_, each) == 0) fetch(each, i);
      }
      note_flights(program_[i]);
      release(i);
      last_work_ = i;
    }
    Program lowered;
    const auto append = [&](const Program& some) {
      lowered.insert(lowered.end(), some.begin(), some.end());
    };
    for (size_t i = 0; i < program_.size(); ++i) {
      append(before_[i]);
      append(begun_[i]);
      lowered.push_back(program_[i]);
      append(behind_[i]);
    }
    return lowered;
  }

 private:
  // What hides a fetch, or needs one.
  bool is_work(size_t i) const {
    return is_compute(program_[i].op) || !needs_[i].empty();
  }

  // One piece of work ahead.
  void fetch(const Instruction& whole, size_t i) {
    auto& ahead = last_work_ ? begun_[*last_work_] : before_[i];
    ahead.push_back(begin(whole));
    before_[i].push_back(await(whole));
    held_.push_back(whole);
  }

  // What a gather reads and writes stays until that is awaited.
  void note_flights(const Instruction& each) {
    if (each.op != Op::kGatherParameters) return;
    if (each.phase == Phase::kBegin) in_flight_.push_back(each.unit);
    if (each.phase == Phase::kAwait) std::erase(in_flight_, each.unit);
  }

  // All but what the next piece of work needs too.
  void release(size_t i) {
    size_t next = i + 1;
    while (next < program_.size() && !is_work(next)) ++next;
    std::erase_if(held_, [&](const Instruction& each) {
      const bool stays = (next < program_.size() &&
                          std::ranges::count(needs_[next], each) > 0) ||
                         (each.op == Op::kFetchParameters &&
                          std::ranges::count(in_flight_, each.unit) > 0);
      if (stays) return false;
      Instruction back = each;
      back.op = release_of(each.op);
      behind_[i].push_back(back);
      return true;
    });
  }

  const Program& program_;
  std::vector<std::vector<Instruction>> needs_;
  // By instruction: fetches that are awaited for it, that begin before it, and
  // releases behind it.
  std::vector<Program> before_, begun_, behind_;
  Program held_;  // fetches that are not released
  std::vector<int64_t> in_flight_;
  std::optional<size_t> last_work_;
};

}  // namespace

Program offload(const Program& program, const Units& units) {
  if (!units.offloads_states && !units.offloads_parameters) return program;
  return Offload(program, units).run();
}

}  // namespace tessera::program::passes
