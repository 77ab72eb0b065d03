#include "tessera/program/schedules/zb_v.h"

#include <algorithm>
#include <utility>

namespace tessera::program::schedules {
namespace {

// As if there were 2 p - 1 micro-batches at least; what is not there is left
// out, which leaves the order of the others sound.
class V {
 public:
  V(const Shape& shape, int64_t stage)
      : p_(shape.stages),
        s_(stage),
        m_(shape.num_microbatches),
        n_(std::max(2 * p_ - 1, m_)) {}

  std::vector<Turn> run() {
    warm_up();
    while (forwards_[1] < forwards_[0] || forwards_[0] < n_) {
      if (forwards_[0] < n_) forward(0);
      whole(0);
      forward(1);
      whole(1);
    }
    cool_down();
    return std::move(turns_);
  }

 private:
  void warm_up() {
    for (int64_t i = 0; i < 2 * (p_ - s_) - 1; ++i) forward(0);
    for (int64_t i = 0; i < s_; ++i) {
      forward(1);
      forward(0);
    }
    for (int64_t i = 0; i < p_ - s_; ++i) {
      forward(1);
      whole(1);
    }
  }

  void cool_down() {
    for (int64_t i = 0; i < s_; ++i) {
      input(0);
      input(1);
    }
    for (int64_t i = 0; i < p_ - s_; ++i) {
      input(0);
      weight(0);
    }
    while (weights_[1] < inputs_[1]) weight(1);
    while (weights_[0] < inputs_[0]) weight(0);
  }

  void forward(int64_t chunk) { push(Op::kForward, chunk, forwards_[chunk]++); }
  void input(int64_t chunk) {
    push(Op::kBackwardInput, chunk, inputs_[chunk]++);
  }
  void weight(int64_t chunk) {
    push(Op::kBackwardWeight, chunk, weights_[chunk]++);
  }
  void whole(int64_t chunk) {
    input(chunk);
    weight(chunk);
  }
  void push(Op op, int64_t chunk, int64_t microbatch) {
    if (microbatch < m_) turns_.push_back({{op, microbatch, chunk}});
  }

  const int64_t p_, s_, m_, n_;
  int64_t forwards_[2] = {}, inputs_[2] = {}, weights_[2] = {};  // of a chunk
  std::vector<Turn> turns_;
};

}  // namespace

std::vector<Turn> zb_v(const Shape& shape, int64_t stage) {
  return V(shape, stage).run();
}

}  // namespace tessera::program::schedules
