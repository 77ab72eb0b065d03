// zb_h1: 1f1b whose backwards come in two parts, the weights' part of stage s
// behind the input part of the s-th micro-batch after it: inputs' gradients go
// on at once, and weights' parts fill what a stage would wait at the end.
// A step's bubble is (p - 1)(tf + tb - tw), of tb for the input part and tw for
// the weights'; min(m, p) micro-batches are alive on every stage.
// Source: Qi et al. 2023, arXiv 2401.10241 (ZB-H1).
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> zb_h1(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
