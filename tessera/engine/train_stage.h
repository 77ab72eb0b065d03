// The trainer's stages: what each instruction of a step's program does to one
// decoder.
//
// Shapes: a micro-batch's inputs and targets: (B, T) of int64.
// Loss:   the sum of cross-entropies over the target tokens of the global
//         batch, divided once by their number: gradients need no scale of
//         micro-batch or rank. So with the auxiliary loss of experts, over
//         samples and layers.
// Comm:   RankStage: that of the model's strategies and of ShardedParameters;
//         the norm is one all_reduce of a double over the world. StarStage:
//         none; devices are threads of this process.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/engine/run_config.h"
#include "tessera/engine/traffic.h"
#include "tessera/models/model.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/compose.h"
#include "tessera/program/executor.h"
#include "tessera/wrappers/replicas.h"

namespace tessera::engine {

// What a step needs beside the model. `share` counts those that see other
// samples: ranks of the data-parallel group, or devices.
struct StepInput {
  std::function<data::Batch(int64_t share, int64_t microbatch)> load;
  int64_t samples = 0;       // of a micro-batch
  int64_t tokens = 0;        // of a sample, on this rank
  double target_tokens = 0;  // of the global batch
  double aux_scale = 0;      // of nn::Balance::loss in the step's loss
  double lr = 0;
};

// What all stages have in common: sums, clipping, the update.
class TrainStage : public program::Stage {
 public:
  TrainStage(parallel::Composed& composed, optim::Optimizer& optimizer,
             comm::Group& world, double clip_norm);

  virtual void begin(StepInput input, int64_t num_microbatches);
  // Of the step that ran: this rank's part of the loss.
  double loss_sum() const { return loss_sum_; }
  double weight() const { return weight_; }
  // Its part of nn::Balance, of all layers and micro-batches.
  double aux_sum() const { return aux_sum_; }
  const at::Tensor& expert_load() const { return expert_load_; }
  // Global L2 norm before clipping.
  double grad_norm() const { return grad_norm_; }
  // What the step moved outside of any group, on the busiest device.
  virtual Traffic traffic() const { return {}; }

  // What this rank counts of the cross-entropy of one batch, without gradients:
  // each token once over the ranks that hold a model together, for which this
  // is collective.
  virtual nn::LossSum evaluate(const data::Batch& batch) = 0;

  void zero_gradients() override;
  void clip_norm() override;
  void optimizer_step() override;

 protected:
  // Adds to the sums; throws where the loss is not finite.
  void count(double sum, double weight, int64_t microbatch);
  void count(const nn::Balance& balance);
  void take_norm();

  parallel::Composed& composed_;
  StepInput input_;

 private:
  optim::Optimizer& optimizer_;
  comm::Group& world_;
  double clip_norm_;
  double loss_sum_ = 0;
  double weight_ = 0;
  double aux_sum_ = 0;
  at::Tensor expert_load_;
  double grad_norm_ = 0;
};

// One rank of a mesh.
class RankStage final : public TrainStage {
 public:
  RankStage(models::Model& decoder, parallel::Composed& composed,
            optim::Optimizer& optimizer, comm::Group& world, double clip_norm,
            const RecomputeOptions& recompute);

  nn::LossSum evaluate(const data::Batch& batch) override;

  void begin(StepInput input, int64_t num_microbatches) override;
  void load_inputs(int64_t microbatch) override;
  void load_targets(int64_t microbatch) override;
  void exchange(const program::Program& messages) override;
  void forward(int64_t microbatch, int64_t unit) override;
  void backward(int64_t microbatch, int64_t unit) override;
  void gather_parameters(int64_t unit) override;
  void free_parameters(int64_t unit) override;
  void reduce_gradients(int64_t unit) override;
  void await_gradients() override;

 private:
  // A unit between its forward and its backward. Its graph ends at its own
  // input, whose gradient is handed to the unit before. Without a graph the
  // output is computed again.
  struct Passed {
    at::Tensor input;
    at::Tensor output;
    at::Tensor gradient;  // of the output
    nn::Balance balance = {};
  };
  struct Microbatch {
    data::Batch batch;  // this rank's tokens
    std::vector<Passed> units;
  };

  bool is_last(int64_t unit) const { return unit == decoder_.num_units() - 1; }
  bool is_recomputed(int64_t unit) const;
  data::Batch local(const data::Batch& batch) const;
  void load(int64_t microbatch);
  // (B, T, D) between blocks, uninitialised.
  at::Tensor hidden(int64_t samples, int64_t tokens) const;
  // The stage at the other end, and the message's tag.
  struct Wire {
    bool sends;
    bool activations;
    int64_t peer;
    int64_t tag;
  };
  Wire wire_of(const program::Instruction& message) const;

  models::Model& decoder_;
  const RecomputeOptions recompute_;
  std::vector<Microbatch> microbatches_;
};

// Data parallelism on threads, around device 0 (mesh.data_parallel: dp).
class StarStage final : public TrainStage {
 public:
  // `decoders[0]` is the one that is trained; the others have its shape.
  StarStage(std::vector<std::shared_ptr<models::Model>> decoders,
            parallel::Composed& composed, optim::Optimizer& optimizer,
            comm::Group& world, double clip_norm);

  Traffic traffic() const override;
  nn::LossSum evaluate(const data::Batch& batch) override;

  void zero_gradients() override;
  void load_inputs(int64_t microbatch) override;
  void load_targets(int64_t microbatch) override;
  void exchange(const program::Program& messages) override;
  void forward(int64_t microbatch, int64_t unit) override;
  void backward(int64_t microbatch, int64_t unit) override;
  void gather_parameters(int64_t unit) override;
  void free_parameters(int64_t unit) override;
  void reduce_gradients(int64_t unit) override;
  void await_gradients() override;

 private:
  Traffic so_far() const;

  std::vector<std::shared_ptr<models::Model>> decoders_;
  wrappers::Replicas replicas_;
  Traffic before_;                    // of the steps before
  std::vector<data::Batch> batches_;  // by device
};

}  // namespace tessera::engine
