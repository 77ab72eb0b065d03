// The learning rate of a step: a pure function of the step's number.
//
// With s = 0, 1, ... the step, T the steps of the schedule (its own, or those
// of the whole run), W the warm-up:
//   s < W:       start_lr + (lr - start_lr) g, g = (s + 1) / W, or with
//                warmup_type log g = log(s + 1) / log(W) (W 1: g = 1)
//   after it, p = (s - W) / (T - W) runs from 0 towards 1 (reached at s = T):
//   constant:    lr
//   linear:      min_lr + (lr - min_lr)(1 - p)
//   cosine:      min_lr + (lr - min_lr)(1 + cos(pi p)) / 2
//   wsd:         lr, and in the last D = min(ceil(decay T), T - W) steps
//                min_lr + (lr - min_lr)(1 - q), q = (s - (T - D) + 1) / D:
//                the last step has min_lr
// From s = T on, linear, cosine and wsd stay at min_lr.
//
// With schedule.convention deepspeed, as WarmupLR (constant), WarmupDecayLR
// (linear) and WarmupCosineLR have it, for i = s - 1 and W at least 2:
//   i < 0:       start_lr; of cosine 0
//   i < W:       start_lr + (lr - start_lr) g, g = i / W, or with
//                warmup_type log g = log(i + 1) / log(W)
//   linear:      min_lr + (lr - min_lr) max(0, T - i) / max(1, T - W)
//   cosine:      as above, with p = min(1, (i - W + 1) / max(1, T - W))
// Units:  min_lr is a learning rate, not a factor; steps are optimizer steps.
// Source: cosine: arXiv 1608.03983 without restarts; wsd: warm-up, stable,
//         decay, arXiv 2404.06395; a fifth by default, arXiv 2405.18392;
//         deepspeed: deepspeed/runtime/lr_schedules.py of DeepSpeed.
#pragma once

#include <cstdint>

#include "tessera/optim/optim_config.h"

namespace tessera::optim {

struct RunPosition {
  int64_t step = 0;   // 0 is the first
  int64_t steps = 0;  // of the whole run
};

double lr_at(RunPosition position, double lr, const ScheduleConfig& schedule);

}  // namespace tessera::optim
