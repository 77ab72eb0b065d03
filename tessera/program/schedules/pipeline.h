// Pipelines: the programs of the ranks that hold a model's stages.
//
// A stage is a run of layers; p stages hold a model, and m micro-batches go
// through them. With v chunks a rank holds v runs: chunk c of rank s is virtual
// stage c p + s. F, B: forward and backward of a micro-batch, costs tf and tb.
//
//   naive        one micro-batch at a time        step m p (tf + tb)
//   gpipe        m F, then m B, the last first    (m + p - 1)(tf + tb); m alive
//   1f1b         p - 1 - s F ahead, then F and B in turn: the same step, with
//                min(m, p - s) alive
//   interleaved  1f1b over v p virtual stages, micro-batches in groups of p:
//                (m + (p - 1) / v)(tf + tb); m is a multiple of p
// Source:  Huang et al. 2019, arXiv 1811.06965 (gpipe); Narayanan et al. 2021,
//          arXiv 2006.09503 (1F1B with flush) and 2104.04473 (interleaved).
#pragma once

#include <string>

#include "tessera/program/instruction.h"

namespace tessera::program::schedules {

struct Pipeline {
  std::string schedule = "1f1b";  // naive | gpipe | 1f1b | interleaved
  int64_t stages = 1;             // p
  int64_t chunks = 1;             // v: 1 but for interleaved
  int64_t num_microbatches = 1;   // m
  bool clip = true;
};

// The program of the ranks that hold stage `stage`. With one stage this is
// gradient accumulation: each micro-batch goes forward and at once backward,
// and the activations of one are alive at a time (but for gpipe).
// REQUIRES: a multiple of `stages` as num_microbatches for interleaved.
Program pipeline(const Pipeline& pipeline, int64_t stage);

}  // namespace tessera::program::schedules
