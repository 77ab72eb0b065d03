// The trainer's stages: what each instruction of a step's program does to one
// decoder.
//
// Shapes: a micro-batch's inputs and targets: (B, T) of int64.
// Loss:   the sum of cross-entropies over the target tokens of the global
//         batch, divided once by their number: gradients need no scale of
//         micro-batch or rank.
// Comm:   RankStage: the gradient reducer's. StarStage: none; devices are
//         threads of this process.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/models/decoder.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/compose.h"
#include "tessera/parallel/data_parallel/replicas.h"
#include "tessera/program/executor.h"
#include "tessera/train/traffic.h"

namespace tessera::train {

// What a step needs beside the model. `share` counts those that see other
// samples: ranks of the data-parallel group, or devices.
struct StepInput {
  std::function<data::Batch(int64_t share, int64_t microbatch)> load;
  double target_tokens = 0;  // of the global batch
  double lr = 0;
};

// What all stages have in common: sums, clipping, the update.
class TrainStage : public program::Stage {
 public:
  TrainStage(parallel::Composed& composed, optim::Optimizer& optimizer,
             double clip_norm);

  virtual void begin(StepInput input, int64_t num_microbatches);
  // Of the step that ran: this rank's part of the loss.
  double loss_sum() const { return loss_sum_; }
  double weight() const { return weight_; }
  // Global L2 norm before clipping.
  double grad_norm() const { return grad_norm_; }
  // What the step moved outside of any group, on the busiest device.
  virtual Traffic traffic() const { return {}; }

  void zero_gradients() override;
  void clip_norm() override;
  void optimizer_step() override;

 protected:
  // Adds to the sums; throws where the loss is not finite.
  void count(double sum, double weight, int64_t microbatch);
  void take_norm();

  parallel::Composed& composed_;
  StepInput input_;

 private:
  std::vector<at::Tensor> gradients() const;

  optim::Optimizer& optimizer_;
  double clip_norm_;
  double loss_sum_ = 0;
  double weight_ = 0;
  double grad_norm_ = 0;
};

// One rank of a mesh.
class RankStage final : public TrainStage {
 public:
  RankStage(models::Decoder& decoder, parallel::Composed& composed,
            optim::Optimizer& optimizer, double clip_norm);

  void begin(StepInput input, int64_t num_microbatches) override;
  void load_inputs(int64_t microbatch) override;
  void load_targets(int64_t microbatch) override;
  void forward(int64_t microbatch) override;
  void backward(int64_t microbatch, bool reduce) override;
  void reduce_gradients() override;

 private:
  models::Decoder& decoder_;
  std::vector<data::Batch> batches_;  // by micro-batch
  std::vector<at::Tensor> logits_;    // between forward and backward
};

// Data parallelism on threads, around device 0 (mesh.data_parallel: dp).
class StarStage final : public TrainStage {
 public:
  // `decoders[0]` is the one that is trained; the others have its shape.
  StarStage(std::vector<std::shared_ptr<models::Decoder>> decoders,
            parallel::Composed& composed, optim::Optimizer& optimizer,
            double clip_norm);

  Traffic traffic() const override;

  void zero_gradients() override;
  void load_inputs(int64_t microbatch) override;
  void load_targets(int64_t microbatch) override;
  void forward(int64_t microbatch) override;
  void backward(int64_t microbatch, bool reduce) override;
  void reduce_gradients() override;

 private:
  Traffic so_far() const;

  std::vector<std::shared_ptr<models::Decoder>> decoders_;
  parallel::data_parallel::Replicas replicas_;
  Traffic before_;                    // of the steps before
  std::vector<data::Batch> batches_;  // by device
};

}  // namespace tessera::train
