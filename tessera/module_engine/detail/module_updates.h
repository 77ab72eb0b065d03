// How the shards of a module are updated: by the trainer's optimizer over them,
// with the matrices whole that it needs whole.
//
// Comm:    of whole matrices whole_updates.h's, a unit ahead of its update; at
//          construction names, where groups or matrices are named.
// Errors:  TS_CHECK_CONFIG for globs that name nothing, on all ranks alike.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/module_engine/detail/module_settings.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/data/whole_updates.h"
#include "tessera/wrappers/fully_shard.h"

namespace tessera::detail {

// Names of the parameters that Embeddings look up, whatever else uses them.
// REQUIRES: a module that is not sharded.
std::set<std::string> embedding_names(const torch::nn::Module& module);

class ModuleUpdates {
 public:
  // `hidden`: InitializeOptions::hidden_matrices.
  ModuleUpdates(const std::vector<wrappers::ParameterShard>& shards,
                const ModuleSettings& settings,
                const std::vector<std::string>& hidden,
                const std::set<std::string>& embeddings,
                comm::Communicator& ranks);

  // Of all shards, by gradients that count times `gradient_scale`.
  void step(double lr, double gradient_scale);
  optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  // Segments [first, first + count) of the optimizer.
  struct Unit {
    int64_t number;
    size_t first, count;
    bool gathers;
  };
  void begin_gather(size_t unit);

  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<parallel::data::WholeUpdates> whole_;
  std::vector<Unit> units_;
};

}  // namespace tessera::detail
