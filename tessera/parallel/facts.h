// Facts of a model under these strategies, as a pure function of
// configurations: no tensor, no group, no process. See program/facts.h.
//
// Activations, operations and inner collectives are those of
// models/trace/model_facts.h, with what each strategy's folder puts into them;
// parameters are those of the layouts that place() sets.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/model.h"
#include "tessera/models/model_config.h"
#include "tessera/parallel/data/parameter_facts.h"
#include "tessera/parallel/parallel_config.h"
#include "tessera/program/facts.h"

namespace tessera::parallel {

struct FactsOptions {
  int64_t samples = 1;     // of a micro-batch
  int64_t seq_len = 1;     // of a whole sample
  bool documents = false;  // attention keeps them apart: at most one a sample
  // What comes to its experts, over what it sends to experts.
  double received_rows = 1;
  data::KeptStates kept = {};
  int64_t threads = 1;        // of an operator
  int64_t depths = 0;         // of prediction beyond the next token: of a step
  int64_t micro_batches = 1;  // of a step
  c10::DeviceType device = c10::kCPU;
};

// A model whose parameters lie where these strategies put them, without values:
// whose facts on many ranks are asked for makes it once.
class PlacedModel {
 public:
  // `mesh` and `config` outlive it.
  PlacedModel(const models::ModelConfig& model, const mesh::DeviceMesh& mesh,
              const ParallelConfig& config);

  models::Model& model() const { return *model_; }
  // Of all units, other stages' too. `dropout`: instead of the model's.
  program::Facts facts_of(const mesh::Coord& coord, const FactsOptions& batch,
                          std::optional<double> dropout = {}) const;

 private:
  models::ModelConfig config_;
  const mesh::DeviceMesh& mesh_;
  const ParallelConfig& parallel_;
  std::shared_ptr<models::Model> model_;
  bool are_whole_ = false;                   // gradients, between micro-batches
  std::vector<std::vector<int64_t>> reads_;  // by unit
  std::vector<std::vector<const nn::ParameterSpec*>> owned_;  // by unit
};

}  // namespace tessera::parallel
