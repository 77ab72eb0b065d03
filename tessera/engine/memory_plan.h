// What ranks will hold, from the facts of their model: no rank is started.
//
// Units: bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/parallel/facts.h"
#include "tessera/program/facts.h"
#include "tessera/program/instruction.h"

namespace tessera::engine {

// Of any rank, of a model that is made once. REQUIRES, here and below: a
// completed configuration. It and `mesh` outlive the result.
class RunFacts {
 public:
  RunFacts(const RunConfig& config, const mesh::DeviceMesh& mesh);
  program::Facts of(
      const mesh::Coord& coord,
      program::Purpose purpose = program::Purpose::kTraining) const;
  models::Model& model() const { return placed_.model(); }

 private:
  const RunConfig& config_;
  const mesh::DeviceMesh& mesh_;
  parallel::PlacedModel placed_;
};

// The same, of one rank.
program::Facts facts_of(const RunConfig& config, const mesh::DeviceMesh& mesh,
                        const mesh::Coord& coord,
                        program::Purpose purpose = program::Purpose::kTraining);

// Micro-batches of a step whose rows may wait for each other
// (nn/waiting_rows.h): devices around one multiply each's by themselves.
int64_t batches_that_wait(const RunConfig& config);

struct MemoryPlan {
  // Between steps: parameters, gradients, optimizer; of an evaluation the
  // parameters alone. Without what lies in files.
  int64_t states = 0;
  int64_t optimizer = 0;  // of both
  int64_t in_files = 0;
  // At most, beyond these, while micro-batches go forward and backward.
  int64_t work = 0;
  int64_t saved = 0;  // of parameters and optimizer, in a checkpoint
  // Of the host, whatever the device: what checkpoint.async is written from.
  int64_t copies = 0;
  int64_t on_device() const { return states + work; }
  int64_t total() const { return on_device() + copies; }
};
// By stage of the pipeline, of those of its ranks with the largest parts; of
// data parallelism on threads, of the one rank with all its devices.
std::vector<MemoryPlan> memory_plans(
    const RunConfig& config,
    program::Purpose purpose = program::Purpose::kTraining);
// In training, of the rank that needs the most.
MemoryPlan memory_plan(const RunConfig& config);

// On one rank, before anything is shared out.
struct WholeModel {
  struct Part {
    int64_t elements = 0, trained = 0;  // of its parameters
    int64_t parameter_bytes = 0, optimizer_bytes = 0;
  };
  struct Parts {
    Part experts = {}, others = {};
  };
  Parts all;
  std::vector<Parts> blocks;
};
WholeModel whole_model(const RunConfig& config);

// Weights and the optimizer's tensors of the whole model.
int64_t checkpoint_bytes(const RunConfig& config);

}  // namespace tessera::engine
