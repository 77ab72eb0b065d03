// interleaved_zb: interleaved whose backwards come in two parts, the weights'
// part of stage s behind the s-th input part after it. A step's bubble is
// (p - 1)(tf + tb - tw) / v, of whole stages' tf, tb and tw.
// Source: Qi et al. 2023, arXiv 2401.10241, over the order of Narayanan et al.
//         2021, arXiv 2104.04473.
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> interleaved_zb(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
