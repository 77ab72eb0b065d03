// Applies every kind of parallelism to a model, in one order. Nothing else
// knows which of them are in force: from here on the layouts speak.
//
// Comm:   none here: what is installed communicates during steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/model.h"
#include "tessera/parallel/data/sharded_parameters.h"
#include "tessera/parallel/data/whole_updates.h"
#include "tessera/parallel/model_units.h"
#include "tessera/parallel/parallel_config.h"

namespace tessera::parallel {

struct ComposeOptions {
  ParallelConfig config;
  uint64_t seed = 0;  // of initial values
  // Fills the materialised boxes in their stead; null: they stay.
  std::function<void()> load = {};
  bool trains = true;            // else no gradients are stored
  int64_t micro_batches = 1;     // of a step
  at::Device device = at::kCPU;  // that layers compute on
  // For what stays between steps of a unit's parameters, and, of unit -1, for
  // what stays until they are cut; null: LibTorch's and the groups'.
  data::UnitMemory memory = nullptr;
};

// Which parameters that are trained are hidden matrices, in their order.
struct Composed;
std::vector<bool> hidden_matrices(const Composed& composed);

// Whether the model fits the mesh. REQUIRES: a complete configuration of it.
// Stages ask for micro-batches besides: see pipeline::check().
void check(const models::ModelConfig& model, int64_t seq_len,
           const mesh::DeviceMesh& mesh, const ParallelConfig& config);

// Whether what adds one token at a time can run on it.
void check_generation(const mesh::Degrees& mesh);

// Of so many tokens of a sample, those that a rank has.
int64_t local_length(int64_t seq_len, const mesh::DeviceMesh& mesh);

// What strategies decide about parameters, before any rank is there: on which
// axes they are cut, and over which their gradients are summed. The stages that
// hold them are left to the pipeline. REQUIRES: a model that is not
// materialised.
void place(models::Model& model, const mesh::DeviceMesh& mesh,
           const ParallelConfig& config);

// The stage of ZeRO that a parameter is held in. One rank has nobody to share
// with: it is plain data parallelism, but for weights in files in stage 3, of
// which it has in memory what it has gathered.
int64_t zero_stage_of(const mesh::Layout& layout, const mesh::DeviceMesh& mesh,
                      const ParallelConfig& config);

// What programs need to know of the model; sets which stages hold its
// parameters. REQUIRES: place().
ModelUnits model_units(models::Model& model, const mesh::DeviceMesh& mesh,
                       const ParallelConfig& config);

// The owners whose parameters each unit computes with, its own first.
std::vector<std::vector<int64_t>> reads_of(models::Model& model);

// A model on this rank's place of the mesh, ready to run.
struct Composed {
  // (B, T) of all tokens -> those of this rank.
  at::Tensor local_tokens(const at::Tensor& tokens) const;

  mesh::DeviceMesh mesh;
  mesh::Coord coord;
  comm::Group* data = nullptr;      // ranks that see other samples
  comm::Group* pipeline = nullptr;  // ranks that hold the other stages
  at::TensorOptions activations;    // their type and device
  std::unique_ptr<data::ShardedParameters> parameters;
  // Of those that are trained, where matrices are updated whole.
  std::unique_ptr<data::WholeUpdates> updates;
  ModelUnits model;      // of all ranks
  program::Units units;  // how a program goes over this rank's part of it
};

Composed compose(models::Model& model, const mesh::DeviceMesh& mesh,
                 comm::Communicator& ranks, const ComposeOptions& options);

}  // namespace tessera::parallel
