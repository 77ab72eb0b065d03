// What initialize() gives, but for what depends on the module's type.
#pragma once

#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/module_engine/started_ranks.h"
#include "tessera/wrappers/fully_shard.h"

namespace tessera {

struct InitializeOptions {
  // Keys of a run's configuration, for what the file leaves to it with "auto",
  // and where it says nothing: {{"optimizer.lr", "1e-3"}}. DeepSpeed has no
  // words for optimizer.groups (by names of parameters), ema, normalize_grad
  // and state_dtype.
  std::vector<std::pair<std::string, std::string>> settings = {};
  // fully_shard's.
  std::vector<std::string> units = {};
  // Of optimizer.type muon: globs over names of parameters, of which it
  // orthogonalises those of two dimensions. None: as DeepSpeed all but
  // embeddings, by their class or by "embed" or "lm_head" in their names; but
  // not those of more dimensions (convolutions), which DeepSpeed's Muon takes.
  std::vector<std::string> hidden_matrices = {};
  const DeferredInit* deferred = nullptr;
  bool deferred_values = true;
};

// The mesh that initialize() lays over so many ranks, for a MoE in the module.
// Errors: as initialize()'s of the file.
mesh::DeviceMesh mesh_of(const std::string& json, int64_t world_size,
                         const InitializeOptions& options = {});

// While it lives parameters are their averages over the updates, for forwards
// and for gather().
using AveragedParameters = c10::scope_exit<std::function<void()>>;

class ModuleEngine {
 public:
  ModuleEngine(torch::nn::Module& module, const std::string& json,
               comm::Communicator& ranks, const InitializeOptions& options);
  ModuleEngine(torch::nn::Module& module, const std::string& json,
               StartedRanks ranks, const InitializeOptions& options);
  ~ModuleEngine();
  ModuleEngine(ModuleEngine&&) noexcept;
  ModuleEngine& operator=(ModuleEngine&&) = delete;

  // Of a micro-batch's loss, behind its forward.
  void backward(const at::Tensor& loss);
  // Behind every backward; the last one of a batch updates.
  void step();
  // Whether the next step() updates.
  bool is_gradient_accumulation_boundary() const;

  int64_t rank() const;
  int64_t local_rank() const;  // among the ranks of this host
  int64_t world_size() const;
  int64_t train_batch_size() const;  // samples an update, over all ranks
  int64_t train_micro_batch_size_per_gpu() const;  // of a forward, of a rank
  int64_t gradient_accumulation_steps() const;
  int64_t zero_optimization_stage() const;
  int64_t global_steps() const;     // updates so far, those skipped too
  int64_t skipped_steps() const;    // whose gradients were not finite
  double loss_scale() const;        // of the next update
  double lr() const;                // of the next update
  double global_grad_norm() const;  // of the last update, before clipping
  // What the file became: keys of a run, values, and where each is from.
  const std::string& config() const;

  // Parameters, buffers, optimizer and place, in FOLDER/step-N of so many
  // updates (checkpoint.h), with a text of the user's own, in UTF-8: every rank
  // calls it with the same arguments, between updates. Loading: from FOLDER's
  // newest good one, or from FOLDER where that is a step-N; on any number of
  // ranks, in any stage. The text; none where FOLDER has no checkpoint.
  void save_checkpoint(const std::string& folder,
                       const std::string& client_state = "");
  std::optional<std::string> load_checkpoint(const std::string& folder);

  // REQUIRES: optimizer.ema; no update, and no checkpoint, while it lives.
  [[nodiscard]] AveragedParameters averaged();

  // FullySharded's.
  wrappers::GatheredParameters gather() { return core().gather(); }
  std::vector<wrappers::ParameterShard> shards() const;

 protected:
  wrappers::FullyShardedCore& core();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
