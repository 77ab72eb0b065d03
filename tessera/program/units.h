// From chunks to units: a schedule says when a chunk of the model goes forward
// and backward; here each of these becomes its units' one after the other, and
// what ZeRO needs goes to its places.
//
// A unit is what runs, is gathered and is reduced as one: an embedding, a
// block, a head. It owns parameters, and may read those of another unit too (a
// tied embedding), also of one that only owns parameters and never runs (the
// experts of a block, which may be in another stage of ZeRO).
//
// ZeRO stages, by where parameters and gradients live between instructions:
//   0, 1:  parameters and gradients whole. A unit's gradients are reduced once,
//          after the last backward that adds to them. With 1 every rank updates
//          its shard, and parameters are gathered after the optimizer's step.
//   2:     gradients as shards: reduced after the backward of each micro-batch.
//   3:     parameters as shards too: gathered before a unit runs, freed after.
//          Without reshard_after_forward they stay from a micro-batch's forward
//          to its backward; so do parameters that several units read.
// Source:  Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv
//          2304.11277.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/program/instruction.h"

namespace tessera::program {

struct Units {
  // By chunk, in the order of the forward: its units. Empty: the program names
  // whole chunks.
  std::vector<std::vector<int64_t>> chunks;
  // By unit, also of those that run elsewhere: the units whose parameters it
  // reads, itself included.
  std::vector<std::vector<int64_t>> reads;
  std::vector<int64_t> zero_stages;   // by unit
  bool reshard_after_forward = true;  // of stage 3

  // The units that run here and read the parameters of `unit`, ascending.
  std::vector<int64_t> readers_of(int64_t unit) const;
  // The units whose parameters some unit that runs here reads, ascending.
  std::vector<int64_t> owners() const;
};

// REQUIRES: a program of whole chunks.
Program over_units(const Program& program, const Units& units);

}  // namespace tessera::program
