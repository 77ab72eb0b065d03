// The units of a model as a rank's program goes over them.
//
// A unit is what runs, is gathered and is reduced as one: an embedding, a
// block, a head. It owns parameters, and may read those of another unit too (a
// tied embedding), also of one that only owns parameters and never runs (the
// experts of a block, which may be in another stage of ZeRO).
//
// ZeRO stages, by where parameters and gradients live between instructions:
//   0:     parameters and gradients whole. A unit's gradients are reduced once,
//          after the last backward that adds to them.
//   1:     so too, but every rank updates its shard alone: parameters are
//          gathered before their first use in a program, where forwards hide
//          it, and stale behind the update.
//   2:     gradients as shards: reduced after the backward of each micro-batch.
//   3:     parameters as shards too: gathered before a unit runs, freed after.
//          Without reshard_after_forward they stay from a micro-batch's forward
//          to its backward; so do parameters that several units read.
//
// Recomputation: a unit whose activations are not kept has them computed again
//          from the input of a unit of its chunk that is kept: its own, or that
//          of one before it, and then all units in between are passed again.
//          Of n units alone that is n forwards more; of a run of them together,
//          each once, n too, and all of the run's activations are there
//          meanwhile; with `minimal` the forward starts anew for each of a run,
//          which keeps the activations of one and takes n (n + 1) / 2.
// Source:  Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv
//          2304.11277; Chen et al. 2016, arXiv 1604.06174 (recomputation).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/program/instruction.h"

namespace tessera::program {

struct Unit {
  std::vector<int64_t> reads;  // the owners of its parameters, itself included
  int64_t zero_stage = 0;      // of its own parameters, as all below
  bool reduced = true;         // its gradients are not where backwards add
                               // them up, or other ranks add to them
  bool summed = false;         // its shards' gradients have replicas beside
  bool across_stages = false;  // other stages take part in its reduction
  bool whole_updates = false;  // pieces of its updates are gathered first
  int64_t bytes = 0;           // of its parameters, gathered
  bool trained = true;         // some parameter is: it has optimizer states
  bool ahead = false;          // it needs the tokens ahead of its input's
  // Its activations are not kept, but computed again from the input of this
  // unit of its chunk. Units that share one follow each other, from it on.
  std::optional<int64_t> recomputed_from = {};
  // From its own input, and so attention's core alone: all else is kept.
  bool attention_alone = false;
};

// Of the parameters that are trained: with two the next batch goes forward
// before this step's update; and of their gradients: with two also backward.
struct Versions {
  int64_t parameters = 1, gradients = 1;
};

struct Units {
  // By chunk, in the order of the forward: its units. Empty: the program names
  // whole chunks.
  std::vector<std::vector<int64_t>> chunks;
  std::vector<Unit> all;              // also those that run elsewhere
  bool reshard_after_forward = true;  // of stage 3
  int64_t prefetch = 1;  // units whose parameters are gathered ahead
  int64_t prefetch_bytes = INT64_MAX;  // of gathered parameters, at most
  bool alone = false;                  // a world of one rank
  int64_t devices = 1;                 // of this process: more than one, a star
  bool documents = false;     // forwards need to know where documents begin
  bool shares_batch = false;  // one rank of several reads what all train on
  // What lies in files between its uses: the optimizer's states, and this
  // rank's own parameters too.
  bool offloads_states = false, offloads_parameters = false;
  bool minimal = false;  // for each unit's backward everything is passed again
  Versions versions = {};

  // The units that run here and read the parameters of `unit`, ascending.
  std::vector<int64_t> readers_of(int64_t unit) const;
  // The units whose parameters some unit that runs here reads, ascending.
  std::vector<int64_t> owners() const;
};

// What an instruction reads or writes of what lies in files, as whole fetches.
std::vector<Instruction> fetched_for(const Instruction& instruction,
                                     const Units& units);

}  // namespace tessera::program
