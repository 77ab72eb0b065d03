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
#include "tessera/parallel/context/context_parallel.h"
#include "tessera/parallel/data/sharded_parameters.h"
#include "tessera/parallel/expert/expert_parallel.h"
#include "tessera/parallel/model_units.h"
#include "tessera/parallel/pipeline/stages.h"
#include "tessera/parallel/tensor/tensor_parallel.h"

namespace tessera::parallel {

struct ComposeOptions {
  nn::MaterialiseOptions materialise;
  // Fills the materialised boxes from elsewhere; null: the initial values stay.
  std::function<void()> load;
  tensor::TensorOptions tensor;
  context::ContextOptions context;
  pipeline::PipelineOptions pipeline;
  int64_t zero_stage = 0;
  int64_t expert_zero_stage = 0;
  UnitOptions units;
  bool trains = true;  // else no gradients are stored
};

// What strategies decide about parameters, before any rank is there: on which
// axes they are cut, and over which their gradients are summed. The stages that
// hold them are left to the pipeline. REQUIRES: a model that is not
// materialised.
void place(models::Model& model, const mesh::DeviceMesh& mesh,
           const ComposeOptions& options);

// The stage of ZeRO that a parameter is held in. One rank has nobody to share
// with: it is plain data parallelism.
int64_t zero_stage_of(const mesh::Layout& layout, const mesh::DeviceMesh& mesh,
                      const ComposeOptions& options);

// What programs need to know of the model; sets which stages hold its
// parameters. REQUIRES: place().
ModelUnits model_units(models::Model& model, const mesh::DeviceMesh& mesh,
                       const ComposeOptions& options);

// The owners whose parameters each unit computes with, its own first.
std::vector<std::vector<int64_t>> reads_of(models::Model& model);

// A model on this rank's place of the mesh, ready to run.
struct Composed {
  mesh::DeviceMesh mesh;
  mesh::Coord coord;
  comm::Group* data = nullptr;      // ranks that see other samples
  comm::Group* pipeline = nullptr;  // ranks that hold the other stages
  std::unique_ptr<data::ShardedParameters> parameters;
  ModelUnits model;      // of all ranks
  program::Units units;  // how a program goes over this rank's part of it
};

Composed compose(models::Model& model, const mesh::DeviceMesh& mesh,
                 comm::Communicator& ranks, const ComposeOptions& options);

}  // namespace tessera::parallel
