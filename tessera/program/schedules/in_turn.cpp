#include "tessera/program/schedules/in_turn.h"

#include <algorithm>

namespace tessera::program::schedules {

std::vector<Task> in_groups(const Shape& shape, Op op, int64_t group) {
  const int64_t m = shape.num_microbatches, v = shape.chunks;
  std::vector<Task> tasks;
  for (int64_t first = 0; first < m; first += group) {
    for (int64_t i = 0; i < v; ++i) {
      const int64_t chunk = op == Op::kForward ? i : v - 1 - i;
      for (int64_t each = first; each < std::min(m, first + group); ++each) {
        tasks.push_back({op, each, chunk});
      }
    }
  }
  return tasks;
}

std::vector<Turn> in_turn(const std::vector<Task>& forwards,
                          const std::vector<Task>& backwards, int64_t ahead,
                          bool paired /* = false */) {
  const auto n = static_cast<int64_t>(forwards.size());
  ahead = std::min(ahead, n);
  std::vector<Turn> turns;
  for (int64_t i = 0; i < ahead; ++i) turns.push_back({forwards[i]});
  for (int64_t i = 0; i < n; ++i) {
    const bool has_forward = ahead + i < n;
    if (has_forward) turns.push_back({forwards[ahead + i]});
    if (!has_forward || !paired) turns.emplace_back();
    turns.back().push_back(backwards[i]);
  }
  return turns;
}

std::vector<Turn> with_late_weights(const std::vector<Task>& forwards,
                                    const std::vector<Task>& backwards,
                                    int64_t ahead, int64_t late) {
  const auto part = [&](Op op, int64_t i) -> Turn {
    return {{op, backwards[i].microbatch, backwards[i].chunk}};
  };
  const auto n = static_cast<int64_t>(backwards.size());
  std::vector<Turn> turns;
  int64_t inputs = 0;
  for (const Turn& turn : in_turn(forwards, backwards, ahead)) {
    if (turn.front().op == Op::kForward) {
      turns.push_back(turn);
      continue;
    }
    turns.push_back(part(Op::kBackwardInput, inputs));
    if (inputs >= late) {
      turns.push_back(part(Op::kBackwardWeight, inputs - late));
    }
    ++inputs;
  }
  for (int64_t i = std::max<int64_t>(0, n - late); i < n; ++i) {
    turns.push_back(part(Op::kBackwardWeight, i));
  }
  return turns;
}

}  // namespace tessera::program::schedules
