#include "tessera/train/train_stage.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/loss.h"
#include "tessera/optim/gradient_norm.h"

namespace tessera::train {

TrainStage::TrainStage(parallel::Composed& composed,
                       optim::Optimizer& optimizer, double clip_norm)
    : composed_(composed), optimizer_(optimizer), clip_norm_(clip_norm) {}

void TrainStage::begin(StepInput input, int64_t /*num_microbatches*/) {
  input_ = std::move(input);
  loss_sum_ = 0;
  weight_ = 0;
  grad_norm_ = 0;
}

void TrainStage::zero_gradients() { composed_.reducer->zero(); }

void TrainStage::count(double sum, double weight, int64_t microbatch) {
  TS_CHECK(std::isfinite(sum), "train: the loss of micro-batch ", microbatch,
           " is ", sum,
           ". A smaller optimizer.lr, a longer schedule.warmup or "
           "a lower optimizer.clip_norm may help; the last checkpoint is "
           "whole.");
  loss_sum_ += sum;
  weight_ += weight;
}

void TrainStage::take_norm() {
  // Every rank holds every gradient whole: each element counts here once.
  grad_norm_ = std::sqrt(optim::sum_of_squares(gradients()));
  TS_CHECK(std::isfinite(grad_norm_), "train: the gradient's norm is ",
           grad_norm_, "; the weights were not changed by this step.");
}

void TrainStage::clip_norm() {
  optim::scale_gradients(gradients(),
                         optim::clip_scale(grad_norm_, clip_norm_));
}

void TrainStage::optimizer_step() { optimizer_.step(input_.lr); }

std::vector<at::Tensor> TrainStage::gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : composed_.parameters) {
    gradients.push_back(parameter.tensor.grad());
  }
  return gradients;
}

RankStage::RankStage(models::Decoder& decoder, parallel::Composed& composed,
                     optim::Optimizer& optimizer, double clip_norm)
    : TrainStage(composed, optimizer, clip_norm), decoder_(decoder) {}

void RankStage::begin(StepInput input, int64_t num_microbatches) {
  TrainStage::begin(std::move(input), num_microbatches);
  batches_.assign(num_microbatches, {});
  logits_.assign(num_microbatches, {});
}

void RankStage::load_inputs(int64_t microbatch) {
  batches_.at(microbatch) = input_.load(composed_.data->rank(), microbatch);
}

// Inputs and targets are one read of the token file: load_inputs() made it.
void RankStage::load_targets(int64_t microbatch) {
  TORCH_INTERNAL_ASSERT(batches_.at(microbatch).targets.defined());
}

void RankStage::forward(int64_t microbatch) {
  logits_.at(microbatch) = decoder_.forward(batches_.at(microbatch).inputs);
}

void RankStage::backward(int64_t microbatch, bool reduce) {
  const data::Batch batch = std::exchange(batches_.at(microbatch), {});
  const nn::LossSum loss = nn::cross_entropy(
      std::exchange(logits_.at(microbatch), {}), batch.targets);
  count(loss.sum.item<double>(), loss.weight.item<double>(), microbatch);
  if (reduce) composed_.reducer->arm();
  torch::autograd::backward({loss.sum / input_.target_tokens}, {});
}

void RankStage::reduce_gradients() {
  const auto reduced = composed_.reducer->finish();
  TS_CHECK(reduced.missing_gradients == 0, "train: ", reduced.missing_gradients,
           " gradients never came; here: ",
           reduced.missing_here.empty() ? "none" : reduced.missing_here[0]);
  take_norm();
}

StarStage::StarStage(std::vector<std::shared_ptr<models::Decoder>> decoders,
                     parallel::Composed& composed, optim::Optimizer& optimizer,
                     double clip_norm)
    : TrainStage(composed, optimizer, clip_norm),
      decoders_(std::move(decoders)),
      replicas_({decoders_.begin(), decoders_.end()},
                std::vector<at::Device>(decoders_.size(), at::kCPU)),
      batches_(decoders_.size()) {}

// Device 0 is the busiest: what it sends and receives.
Traffic StarStage::so_far() const {
  const auto& first = replicas_.traffic()[0];
  return {.seconds = replicas_.star_seconds(),
          .bytes = first.model_in + first.model_out + first.batch_in +
                   first.batch_out};
}

Traffic StarStage::traffic() const { return so_far() - before_; }

void StarStage::zero_gradients() {
  before_ = so_far();
  TrainStage::zero_gradients();
  replicas_.replicate();
}

void StarStage::load_inputs(int64_t microbatch) {
  for (size_t device = 0; device < batches_.size(); ++device) {
    batches_[device] = input_.load(static_cast<int64_t>(device), microbatch);
    replicas_.count_batch(0, device, batches_[device].inputs);
  }
}

void StarStage::load_targets(int64_t /*microbatch*/) {
  for (size_t device = 0; device < batches_.size(); ++device) {
    replicas_.count_batch(0, device, batches_[device].targets);
  }
}

// A device's graph stays on its thread: backward() does both directions there.
void StarStage::forward(int64_t /*microbatch*/) {}

void StarStage::backward(int64_t microbatch, bool /*reduce*/) {
  std::vector<std::pair<double, double>> sums(decoders_.size());
  replicas_.run(decoders_.size(), [&](size_t device) {
    const auto& batch = batches_[device];
    const nn::LossSum loss =
        decoders_[device]->loss(batch.inputs, batch.targets);
    sums[device] = {loss.sum.item<double>(), loss.weight.item<double>()};
    torch::autograd::backward({loss.sum / input_.target_tokens}, {});
  });
  for (const auto& [sum, weight] : sums) count(sum, weight, microbatch);
}

void StarStage::reduce_gradients() {
  replicas_.reduce_gradients();
  take_norm();
}

}  // namespace tessera::train
