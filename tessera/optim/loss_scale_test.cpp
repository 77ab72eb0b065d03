#include "tessera/optim/loss_scale.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/random.h"

namespace tessera::optim {
namespace {

// As torch.amp.GradScaler has it: amp_update_scale of AmpKernels.cu, in fp32.
struct GradScaler {
  float scale;
  int interval, tracker = 0;

  void update(bool found_inf) {
    if (found_inf) {
      scale *= 0.5F;
      tracker = 0;
      return;
    }
    if (++tracker < interval) return;
    tracker = 0;
    const float grown = scale * 2.0F;
    if (std::isfinite(grown)) scale = grown;
  }
};

// As deepspeed/runtime/fp16/loss_scaler.py has it, line by line.
struct DynamicLossScaler {
  double scale, floor;
  int window, delayed_shift;
  bool consecutive;
  int iter = 0, last_overflow = -1, hysteresis = delayed_shift;
  bool raised = false;

  void update(bool overflow) {
    if (overflow) {
      if (delayed_shift == 1 || hysteresis == 1) {
        raised = scale == floor;
        scale = std::max(scale / 2, floor);
      } else {
        hysteresis -= 1;
      }
      last_overflow = iter;
    } else {
      if (consecutive) hysteresis = delayed_shift;
      const int stable = iter - last_overflow - 1;
      if (stable > 0 && stable % window == 0) {
        if (!consecutive) hysteresis = delayed_shift;
        scale *= 2;
      }
    }
    iter += 1;
  }
};

std::vector<bool> finite_steps(int seed, double share) {
  const random::Stream stream(seed, "finite");
  std::vector<bool> all;
  for (int i = 0; i < 400; ++i) all.push_back(stream.uniform(i) < share);
  return all;
}

TEST(LossScale, IsThatOfGradScaler) {
  for (const int interval : {1, 3, 7}) {
    LossScale own({.fixed = 0,
                   .initial = 0x1p100,
                   .floor = 0x1p-126,
                   .growth_interval = interval});
    GradScaler theirs{0x1p100F, interval};
    for (const bool is_finite : finite_steps(interval, 0.9)) {
      EXPECT_EQ(own.value(), theirs.scale);
      own.update(is_finite);
      theirs.update(!is_finite);
    }
  }
}

TEST(LossScale, WithHysteresisItIsThatOfDeepSpeed) {
  for (const auto& [shift, window] : {std::pair{2, 5}, {3, 5}, {2, 1}}) {
    for (const bool consecutive : {false, true}) {
      LossScale own({.fixed = 0,
                     .initial = 0x1p16,
                     .floor = 0x1p-200,
                     .growth_interval = window,
                     .hysteresis = shift,
                     .consecutive_hysteresis = consecutive});
      DynamicLossScaler theirs{0x1p16, 0x1p-200, window, shift, consecutive};
      for (const bool is_finite : finite_steps(shift, 0.7)) {
        if (theirs.scale > 0x1p120) break;  // ours ends where fp32 does
        EXPECT_EQ(own.value(), theirs.scale) << shift << consecutive;
        own.update(is_finite);
        theirs.update(!is_finite);
      }
    }
  }
}

std::string error_at_the_floor(const FloorWords& words) {
  LossScale own({.fixed = 0, .initial = 1, .floor = 1, .words = words});
  try {
    own.update(false);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(LossScale, SaysWhatItsCallerCallsTheFloor) {
  EXPECT_NE(error_at_the_floor({}).find("LossScaleRule::floor"),
            std::string::npos);
  EXPECT_EQ(error_at_the_floor({}).find("precision."), std::string::npos);
  const std::string said = error_at_the_floor(
      {.who = "run", .floor = "its key", .way_out = "Try less."});
  EXPECT_NE(said.find("run: a gradient is not finite"), std::string::npos);
  EXPECT_NE(said.find("its floor, its key: "), std::string::npos);
  EXPECT_NE(said.find("Try less."), std::string::npos);
}

TEST(LossScale, AtItsFloorItEndsTheRun) {
  LossScale own({.fixed = 0, .initial = 4, .floor = 1});
  DynamicLossScaler theirs{4, 1, 2000, 1, false};
  for (const double next : {2.0, 1.0}) {
    own.update(false);
    theirs.update(true);
    EXPECT_EQ(own.value(), next);
    EXPECT_EQ(theirs.scale, next);
    EXPECT_FALSE(theirs.raised);
  }
  theirs.update(true);
  EXPECT_TRUE(theirs.raised);
  try {
    own.update(false);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kFailed);
    EXPECT_NE(std::string(error.what()).find("is at its floor"),
              std::string::npos);
  }
}

TEST(LossScale, AFixedOneStaysWhatItIs) {
  LossScale none, fixed({.fixed = 128});
  EXPECT_FALSE(none.scales());
  EXPECT_EQ(none.value(), 1);
  for (const bool is_finite : finite_steps(1, 0.5)) fixed.update(is_finite);
  fixed.go_on({.scale = 7});
  EXPECT_TRUE(fixed.scales());
  EXPECT_EQ(fixed.value(), 128);
}

TEST(LossScale, GoesOnWhereItStood) {
  const LossScaleRule rule{
      .fixed = 0, .floor = 0x1p-100, .growth_interval = 3, .hysteresis = 2};
  const auto steps = finite_steps(9, 0.8);
  for (size_t stop : {1, 50, 51, 52, 53}) {
    LossScale before(rule), after(rule), all(rule);
    for (size_t i = 0; i < stop; ++i) before.update(steps[i]);
    after.go_on(before.state());
    for (size_t i = 0; i < steps.size(); ++i) {
      all.update(steps[i]);
      if (i >= stop) after.update(steps[i]);
    }
    EXPECT_EQ(after.state(), all.state());
  }
}

}  // namespace
}  // namespace tessera::optim
