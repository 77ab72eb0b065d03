#include "tessera/program/schedules/dualpipe_v.h"

#include <algorithm>
#include <deque>
#include <utility>

namespace tessera::program::schedules {
namespace {

// As if there were 2 p micro-batches at least; what is not there is left out,
// which leaves the order of the others sound.
class TwoDirections {
 public:
  TwoDirections(int64_t p, int64_t s, int64_t m)
      : p_(p), s_(s), m_(m), n_(std::max(2 * p, m)) {}

  std::vector<Turn> run() {
    enter();
    meet();
    leave();
    return std::move(turns_);
  }

 private:
  void enter() {
    for (int64_t i = 0; i < 2 * (p_ - s_ - 1); ++i) forward(0);
    for (int64_t i = 0; i < s_ + 1; ++i) {
      forward(0);
      forward(1);
    }
    for (int64_t i = 0; i < p_ - s_ - 1; ++i) {
      input(1);
      weight();
      forward(1);
    }
  }

  void meet() {
    for (int64_t i = 0; i < n_ - 2 * p_ + s_ + 1; ++i) {
      // What the last rank turns around would wait for itself.
      both(0, 1, /*together=*/i > 0 || s_ < p_ - 1);
      both(1, 0);
    }
    for (int64_t i = 0; i < p_ - s_ - 1; ++i) {
      whole(1);
      both(1, 0);
    }
  }

  // The second half of the last backwards lets its weights wait.
  void leave() {
    const int64_t half = (s_ + 1) / 2;
    const bool is_odd = s_ % 2 == 1;
    for (int64_t i = 0; i < s_ + 1; ++i) {
      i > half || (i == half && is_odd) ? input(1) : whole(1);
      i >= half ? input(0) : whole(0);
    }
    for (int64_t i = 0; i < p_ - s_ - 1; ++i) {
      weight();
      input(0);
    }
    while (!waiting_.empty()) weight();
  }

  void forward(int64_t direction) {
    last_forward_ = {Op::kForward, forwards_[direction]++, direction};
    push(last_forward_);
  }
  void whole(int64_t direction) {
    push({Op::kBackward, backwards_[direction]++, direction});
  }
  void both(int64_t forwards, int64_t backwards, bool together = true) {
    forward(forwards);
    const size_t before = turns_.size();
    whole(backwards);
    // Where the last one came in and the micro-batch of neither was left out.
    if (!together || before == 0 || turns_.size() == before ||
        turns_[before - 1] != Turn{last_forward_}) {
      return;
    }
    turns_[before - 1].push_back(turns_[before].front());
    turns_.pop_back();
  }
  void input(int64_t direction) {
    const int64_t microbatch = backwards_[direction]++;
    push({Op::kBackwardInput, microbatch, direction});
    waiting_.push_back({Op::kBackwardWeight, microbatch, direction});
  }
  void weight() {
    push(waiting_.front());
    waiting_.pop_front();
  }
  void push(const Task& task) {
    if (task.microbatch < m_) turns_.push_back({task});
  }

  const int64_t p_, s_, m_, n_;
  int64_t forwards_[2] = {}, backwards_[2] = {};  // of a direction
  std::deque<Task> waiting_;
  Task last_forward_;
  std::vector<Turn> turns_;
};

}  // namespace

std::vector<Turn> in_two_directions(int64_t p, int64_t s, int64_t m) {
  return TwoDirections(p, s, m).run();
}

std::vector<Turn> dualpipe_v(const Shape& shape, int64_t stage) {
  return in_two_directions(shape.stages, stage, shape.num_microbatches);
}

}  // namespace tessera::program::schedules
