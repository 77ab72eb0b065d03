// Pipeline parallelism for modules of one's own: each rank runs its stage of a
// model, and a schedule says when each micro-batch goes through it.
//
//   tessera::PipelineStage stage(module, ranks.rank(), ranks.world_size());
//   tessera::Schedule schedule({stage}, ranks.world(),
//                              {.schedule = "1f1b", .num_microbatches = 8,
//                               .loss = loss_of});
//   for (...) {
//     optimizer.zero_grad();
//     const auto step = schedule.step(inputs, targets);
//     optimizer.step();
//   }
//
// Stages:  in order, `index` of `num_stages`, each a module whose forward()
//          takes what the one before gives: a tensor, a tuple of several (as
//          arguments), or a vector. The first takes inputs, the last gives one
//          tensor. Rank s of p has stage s; with v
//          chunks it has v stages, where the schedule places them
//          (program/placement.h): round robin, or in a V.
// Batches: dim 0 of inputs and targets, the samples, is cut into equal
//          micro-batches. Inputs are read on the rank with the first stage,
//          targets on the one with the last; elsewhere they may be undefined.
// Loss:    the mean over micro-batches of `loss`(output, target), which is to
//          be a mean over samples: that of the whole batch. Gradients are
//          added to .grad, as backward() does.
// Shapes:  what a stage gives is announced along the ranks when inputs of new
//          sizes come, and may differ from its input in size and type; all
//          micro-batches' are alike. Between stages go 8 tensors of 12
//          dimensions at most. Gradients go back for floating-point ones.
// Schedules: those of pipeline.schedule that have a name (program/schedules/),
//          but dualpipe, whose two replicas of each stage nothing sums here,
//          and pipedream_2bw, which goes on from step to step.
//          A backward in two parts (zb_h1 and its kind) is taken apart on
//          autograd's graph: products of matrices and convolutions leave their
//          weights' gradients for the second. Where that cannot be, the first
//          is the whole, which is said once.
// Sharded: a stage may be what fully_shard() gave, on a mesh with pp, which
//          keeps parameters, gradients and states shared out over the ranks
//          that run the same stage; gradients are its mean over them. Its
//          backward is one part in every schedule.
// Comm:    a message each way for each micro-batch between stages; a few
//          numbers along the ranks before a step, and the loss behind it; with
//          `replicas` an all_reduce(mean) of each parameter's gradient; of
//          sharded stages what fully_shard.h says, for each micro-batch.
// BatchNorm: sees a micro-batch at a time, and so do its statistics;
//          SyncBatchNorm (sync_batch_norm.h) those of all replicas.
// Errors:  TS_CHECK_CONFIG for stages, chunks and micro-batches that do not go
//          together, on any rank or between ranks, with what does; TS_CHECK for
//          batches that cannot be cut, inputs or targets that are missing or
//          have other rows. On every rank alike, and nothing was done. A stage
//          that gives another shape than it announced: TS_CHECK on its rank.
// Threads: as comm::Group: one thread a rank.
// Source:  as torch.distributed.pipelining.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/stage_call.h"

namespace tessera {

class PipelineStage {
 public:
  // Holder: a module holder or a std::shared_ptr to a module.
  template <typename Holder>
  PipelineStage(Holder module, int64_t index, int64_t num_stages)
      : module_(as_module(module)),
        forward_([module](const wrappers::Tensors& inputs) mutable {
          const auto call = [&](const auto&... each) {
            return module->forward(each...);
          };
          return wrappers::call_forward(*module, call, inputs);
        }),
        index_(index),
        num_stages_(num_stages) {}
  // What fully_shard() gave, which outlives the result and is not moved: of
  // several reserve the vector first.
  template <typename Holder>
  PipelineStage(FullySharded<Holder>& sharded, int64_t index,
                int64_t num_stages)
      : module_(as_module(sharded.module())),
        forward_([&sharded](const wrappers::Tensors& inputs) {
          const auto call = [&](const auto&... each) {
            return sharded.forward(each...);
          };
          return wrappers::call_forward(*sharded.module(), call, inputs);
        }),
        index_(index),
        num_stages_(num_stages),
        sharded_(&sharded.core()) {}

  wrappers::Tensors forward(const wrappers::Tensors& inputs) const {
    return forward_(inputs);
  }
  torch::nn::Module& module() const { return *module_; }
  // Null: the module is whole.
  wrappers::FullyShardedCore* sharded() const { return sharded_; }
  int64_t index() const { return index_; }
  int64_t num_stages() const { return num_stages_; }

 private:
  template <typename Contained>
  static std::shared_ptr<torch::nn::Module> as_module(
      const torch::nn::ModuleHolder<Contained>& holder) {
    return holder.ptr();
  }
  static std::shared_ptr<torch::nn::Module> as_module(
      std::shared_ptr<torch::nn::Module> module) {
    return module;
  }

  std::shared_ptr<torch::nn::Module> module_;
  std::function<wrappers::Tensors(const wrappers::Tensors&)> forward_;
  int64_t index_;
  int64_t num_stages_;
  wrappers::FullyShardedCore* sharded_ = nullptr;
};

struct ScheduleOptions {
  std::string schedule = "1f1b";
  int64_t num_microbatches = 1;
  // Null: for eval() alone.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>
      loss = nullptr;
  // Ranks that run the same stages on other data: gradients become the mean
  // over them. Null: there are none, or stages are sharded. Outlives the
  // schedule.
  comm::Group* replicas = nullptr;
  bool reversed = true;  // gpipe's backwards: the last micro-batch first
};

class Schedule {
 public:
  // `stages`: this rank's, in the order of their chunks. `ranks`: all that have
  // a stage, in order; outlives the result. Every rank calls it.
  Schedule(std::vector<PipelineStage> stages, comm::Group& ranks,
           const ScheduleOptions& options);
  ~Schedule();
  Schedule(Schedule&&) noexcept;
  Schedule& operator=(Schedule&&) = delete;

  struct Result {
    at::Tensor output;  // of the whole batch, where the last stage is
    double loss = 0;    // on every rank; NaN where none was asked for
  };
  // Forward and backward of all micro-batches. Every rank calls it.
  Result step(const at::Tensor& inputs = {}, const at::Tensor& targets = {});
  // Forward alone; with `targets` on the last stage's rank also the loss.
  Result eval(const at::Tensor& inputs = {}, const at::Tensor& targets = {});
  // Scales gradients so that the L2 norm of those of all stages is at most
  // `most`, which may be 0; what it was. Every rank calls it, behind step().
  // Comm: an all_reduce of a double over `ranks`, of stages that are sharded
  // over all.
  // TS_CHECK_CONFIG, on every rank, where a whole stage is cut along tp.
  double clip_grad_norm(double most);

  // Whether this rank has the first stage, the last one.
  bool is_first() const;
  bool is_last() const;
  // This rank's, as they were given.
  const std::vector<PipelineStage>& stages() const;
  // The instructions of a step, one a line (program/instruction.h).
  std::string describe() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
