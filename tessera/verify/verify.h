// Proof that a mesh trains the model that one rank trains.
//
// A few steps of the configuration with ranks as threads, and the same on one
// rank with the whole batch at once, on the CPU, in double precision, on the
// same random tokens. Compared are every step's loss and gradient norm, every
// parameter as the layers see it, every gradient on every rank that holds a
// part of it, before clipping, and at the end every weight and every tensor of
// the optimizer. A wrong formula shows as a factor or a missing part; rounding
// stays below the bound.
//
// Where it differs, the same is run without each thing that it has in turn, an
// axis of the mesh, ZeRO, recomputation, a pass and so on: that without which
// the difference goes away is named.
//
// Comm:   ranks as threads of this process, over shm. What is begun arrives
//         when it is awaited, not before: no difference depends on time.
// Errors: TS_CHECK where what is under way is changed, never awaited, or waited
//         for where nothing needs it; and on the CPU, whose kernels show it on
//         every machine, where the host reads more than once.
// Memory: the whole model, its weights and gradients of every step and its
//         optimizer, once on one rank and once over the mesh, in fp64: see
//         shrunk().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/engine/run_config.h"

namespace tessera::verify {

struct Difference {
  std::string parameter;  // or "" of a loss or a norm
  // "gradient", "weight", "exp_avg", "loss", ...; "parameter": before the step,
  // as the layers see it; "use": of a kind of parameter, by the step's result.
  std::string what;
  int64_t step = 0;     // from 1
  std::string place;    // coords of the rank that is furthest off
  double relative = 0;  // |mesh - one rank| / |one rank|
  double factor = 0;    // by which it is too large, where it is a multiple
  // Without any one of these it is gone; or, where `each_alone`, it is there
  // with any one of them and no other.
  std::vector<std::string> axes;
  bool each_alone = false;

  // "blocks.0.mlp_norm.weight: gradient 2.000 times too large: summed twice
  // over tp?"
  std::string describe() const;
};

struct Verification {
  int64_t steps = 0;
  // The largest relative differences.
  double loss = 0, grad_norm = 0, gradients = 0, weights = 0, optimizer = 0;
  std::vector<Difference> differences;  // the first step's that has any

  bool equal() const { return differences.empty(); }
};

// REQUIRES: a completed configuration, whose devices the mesh computes on.
// `precision` is fp64, or fp32, in which rounding alone gives losses within
// 1e-5 and tensors within 1e-4.
Verification verify(const engine::RunConfig& config, int64_t world_size,
                    int64_t steps = 3, const std::string& precision = "fp64");

// A small model of the same kind: layers, widths, vocabulary, sequence and
// batch as small as the mesh allows. What does not divide by the mesh still
// does not. Its weights are random. Adapters of layers that are gone go with
// them, a schedule of a file keeps its micro-batches, and a cut by a run's
// trace becomes an even one.
engine::RunConfig shrunk(engine::RunConfig config, int64_t world_size);

}  // namespace tessera::verify
