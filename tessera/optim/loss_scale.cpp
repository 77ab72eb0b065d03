#include "tessera/optim/loss_scale.h"

#include <algorithm>
#include <cmath>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

constexpr double kGrowth = 2.0;  // and 1 / kGrowth shrinks

}  // namespace

LossScale::LossScale(const LossScaleRule& rule)
    : rule_(rule),
      state_{.scale = is_dynamic() ? rule.initial : rule.fixed,
             .finite_in_a_row = none_in_a_row(),
             .hysteresis_left = rule.hysteresis} {}

void LossScale::update(bool is_finite) {
  if (!is_dynamic()) return;
  is_finite ? grow() : shrink();
}

void LossScale::shrink() {
  state_.finite_in_a_row = none_in_a_row();
  if (state_.hysteresis_left > 1) {
    --state_.hysteresis_left;
    return;
  }
  TS_CHECK(state_.scale > rule_.floor, rule_.words.who,
           ": a gradient is not finite, and the loss scale, ", state_.scale,
           ", is at its floor, ", rule_.words.floor,
           ": to halve it further would not help. The weights were not changed "
           "by this step. ",
           rule_.words.way_out);
  state_.scale = std::max(state_.scale / kGrowth, rule_.floor);
}

void LossScale::grow() {
  if (rule_.consecutive_hysteresis) state_.hysteresis_left = rule_.hysteresis;
  if (++state_.finite_in_a_row < rule_.growth_interval) return;
  state_.finite_in_a_row = 0;
  state_.hysteresis_left = rule_.hysteresis;
  const double grown = state_.scale * kGrowth;
  if (std::isfinite(static_cast<float>(grown))) state_.scale = grown;
}

void LossScale::go_on(const LossScaleState& state) {
  if (is_dynamic()) state_ = state;
}

}  // namespace tessera::optim
