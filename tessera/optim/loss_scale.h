// What the loss is multiplied by, so that gradients in fp16 are neither too
// small for it nor too large: fixed, or found while training.
//
//   backward of loss * scale.value(); g = gradients / scale.value()
//   if (scale.skips()) { no update where g is not finite }
//   scale.update(is_finite);  // once behind each step
//
// Rule:    a gradient that is not finite halves the scale, but for the first
//          hysteresis - 1 of them; `growth_interval` finite ones in a row
//          double it, as far as fp32 goes, and then hysteresis counts anew:
//          with `consecutive_hysteresis` after every finite one. With
//          hysteresis 1 it is torch.amp.GradScaler's rule, else DeepSpeed's,
//          which does not count the first finite one, of a run or behind one
//          that is not.
// Ranks:   all have the same scale as long as all hear the same: that a norm
//          over all of them is not finite.
// Errors:  TS_CHECK where a gradient is not finite at the floor, in the
//          caller's words.
// Source:  Micikevicius et al. 2018, arXiv 1710.03740, section 3.2; torch
//          2.13's aten/src/ATen/native/cuda/AmpKernels.cu; DeepSpeed's
//          deepspeed/runtime/fp16/loss_scaler.py, since June 2025.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::optim {

// Who says, and in which words, that a gradient is not finite at the floor.
struct FloorWords {
  const char* who = "loss scale";
  const char* floor = "LossScaleRule::floor";
  const char* way_out =
      "A lower learning rate, a longer warm-up, or bf16 or fp32 in the place "
      "of fp16 may help.";
};

struct LossScaleRule {
  double fixed = 1;  // 0: found while training, by what follows
  double initial = 65536;
  double floor = 1;
  int64_t growth_interval = 2000;
  int64_t hysteresis = 1;
  bool consecutive_hysteresis = false;
  FloorWords words = {};
};

// All that a resumed run needs.
struct LossScaleState {
  double scale = 1;
  int64_t finite_in_a_row = 0;  // since it was changed; -1: one is not counted
  int64_t hysteresis_left = 1;
  bool operator==(const LossScaleState&) const = default;
};

class LossScale {
 public:
  explicit LossScale(const LossScaleRule& rule = {});

  double value() const { return state_.scale; }
  // Whether the loss is multiplied at all: then a step without a finite
  // gradient is skipped.
  bool scales() const { return rule_.fixed != 1; }
  void update(bool is_finite);

  const LossScaleState& state() const { return state_; }
  // Of a run that goes on. A fixed scale stays what it is.
  void go_on(const LossScaleState& state);

 private:
  bool is_dynamic() const { return rule_.fixed == 0; }
  int64_t none_in_a_row() const { return rule_.hysteresis > 1 ? -1 : 0; }
  void shrink();
  void grow();

  LossScaleRule rule_;
  LossScaleState state_;
};

// Steps in a row that updated nothing while the scale stood still: a few are
// passed over, many say that what would train on is lost.
class Standstill {
 public:
  explicit Standstill(int64_t hysteresis)
      : most_(std::max<int64_t>(10, hysteresis)) {}
  void updated() { in_a_row_ = 0; }
  void skipped(bool scale_moved) {
    in_a_row_ = scale_moved ? 0 : in_a_row_ + 1;
  }
  bool is_too_long() const { return in_a_row_ > most_; }
  int64_t in_a_row() const { return in_a_row_; }

 private:
  int64_t most_;
  int64_t in_a_row_ = 0;
};

}  // namespace tessera::optim
