// ZeRO for any module: its parameters, gradients and, since an optimizer sees
// shards alone, optimizer states shared out over the ranks.
//
//   auto model = tessera::fully_shard(GPT(config), mesh, *communicator);
//   torch::optim::AdamW optimizer(model.module()->parameters(), 1e-3);
//   for (...) {
//     optimizer.zero_grad();
//     loss_of(model.forward(input), target).backward();
//     model.clip_grad_norm(1.0);
//     optimizer.step();
//   }
//
// Shards:  dim 0 of every parameter is cut into chunks of ceil(rows / ranks)
//          over dp_shard, the last ones shorter or empty; a scalar lies on the
//          first rank. parameters() of the module are shards from now on;
//          members of its classes (`weight`) are the whole tensors, with memory
//          while they are computed with. Along dp_replicate shards have
//          replicas.
// Stages:  3   parameters are gathered when the module's code first uses one of
//              a unit, in forward and again in backward, and freed behind it;
//              gradients are reduced behind the backward of their unit
//          2   parameters stay whole: gathered once a forward; gradients as 3
//          1   as 2; gradients are whole in a step, and reduced at its end
//          0   nothing is shared out: plain data parallelism, with all else
//              that is here but compute_dtype
// Units:   what is gathered and reduced as one: the elements of its ModuleLists
//          and Sequentials, or the child modules that `units` names. What lies
//          in none, or in several (tied weights), is there from the beginning
//          of a forward to the end of the backward.
// Gradients: the mean over the ranks of what each rank's loss gives. A
//          parameter that no rank's loss reaches has none; one that some do not
//          reach has zeros there. They add up until zero_grad().
// Types:   with compute_dtype a gather rounds; shards stay the masters, and so
//          do gradients and an optimizer's states keep the module's own type.
//          The loss's type is what forward() gives.
// Products: of Linear with a weight that is gathered, in fp32, and in bf16
//          where the processor does not multiply it, are nn/matmul.h's, which
//          are faster than LibTorch's, or add gradients where they lie:
//          TESSERA_WITHOUT_KERNELS=onednn_product,gradient_in_place (or
//          widened_product) leaves them to it.
// Accumulate: accumulate(loss) is a micro-batch before the last: stages 2 and 3
//          reduce it into shards, stage 1 and replicas wait for the last.
//          zero_grad() between them takes none of it away.
// Values:  those of the first rank along the data axes. A module that
//          DeferredInit made (deferred_init.h) gets its memory here, and no
//          rank ever holds the whole.
// Comm:    at construction a comparison of names and shapes, and a broadcast of
//          rank 0's values. A forward gathers P (ranks - 1) / ranks bytes a
//          rank, where P are those of the parameters; in stage 3 so does a
//          backward; a backward reduce-scatters as much. A forward, a
//          backward and its end each begin with one word from every rank, a
//          forward also with the buffers of the first rank that has not joined
//          (broadcast_buffers), which a join() ends with too.
// Order:   ranks need not use the same units in a step, but go forward and
//          backward equally often; a rank whose data has ended calls join(),
//          but for a module with SyncBatchNorm.
//          Units are gathered in the order of the first forward where all
//          ranks had the same, else in that of declaration. Another order is
//          right too, on any rank, and slower.
// Errors:  other modules on other ranks; ranks that do different things (who
//          does what); a parameter used outside of forward and backward; an
//          optimizer that was made before, in its step(); a forward that
//          computes with parameters() of the module, or writes to one of which
//          shards are no part (stage 3, compute_dtype); a parameter that was
//          frozen when the module was sharded, and is to be trained. A second
//          backward through one forward is none. DistributedDataParallel and
//          broadcast_parameters() refuse shards of which ranks have others.
// Experts: of MoE (moe.h) along ep of the mesh: sharded over the ranks that
//          hold the same, each MoE's a unit. All ranks use a MoE equally often,
//          and none can join().
// Limits:  as DistributedDataParallel's: loss.backward() must reach a
//          parameter and run no other backward inside, but recompute()'s;
//          model.backward(loss) need not. Modules that read their own
//          parameters() in forward (ParameterList) see shards: refused. What
//          reads a parameter's data_ptr() with no operator of LibTorch before
//          it is not heard.
//          What takes all of parameters() sees shards: no torch::optim::LBFGS,
//          no clip_grad_norm_ of torch (there is one here), torch::save() under
//          gather() alone. The gradient of a penalty on parameters() is added,
//          not averaged. Hooks on parameters() are not called.
// Threads: as comm::Group: one thread a rank.
// Source:  Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv
//          2304.11277; units and shards as PyTorch's FSDP2 has them.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/wrappers/parameter_shard.h"
#include "tessera/wrappers/sharded_memory.h"

namespace tessera {

class DeferredInit;

struct FullyShardOptions {
  int64_t zero_stage = 3;
  int64_t expert_stage = -1;  // of experts (moe.h); -1: as zero_stage
  // Globs of names of child modules, in which nothing stands for a dot:
  // "blocks.*" are the blocks alone. None: as above.
  std::vector<std::string> units = {};
  bool reshard_after_forward = true;  // of stage 3; the last unit's always
  int64_t prefetch = -1;              // units gathered ahead; -1: 1, on shm 0
  bool broadcast_buffers = true;      // before each forward: see Comm
  // What whole parameters and forward()'s floating-point tensors are rounded
  // to: bf16 or fp16, over masters of the module's own type. None: nothing is.
  std::optional<at::ScalarType> compute_dtype = {};
  // In which gradients are added up and reduced; none: the module's own type.
  std::optional<at::ScalarType> reduce_dtype = {};
  // What made the module without memory; null: it has its values. Outlives the
  // call.
  const DeferredInit* deferred = nullptr;
  // False: shards are left unset, for values that are loaded into shards().
  bool deferred_values = true;

  int64_t stage_of_experts() const {
    return expert_stage < 0 ? zero_stage : expert_stage;
  }
};

namespace wrappers {

// While it lives the module has its whole parameters, in parameters() too.
class GatheredParameters {
 public:
  explicit GatheredParameters(std::function<void()> end)
      : end_(std::move(end)) {}
  ~GatheredParameters() {
    if (end_) end_();
  }
  GatheredParameters(GatheredParameters&& other) noexcept
      : end_(std::exchange(other.end_, nullptr)) {}
  GatheredParameters& operator=(GatheredParameters&&) = delete;

 private:
  std::function<void()> end_;
};

// What does not depend on the module's type.
class FullyShardedCore {
 public:
  FullyShardedCore(torch::nn::Module& module, const mesh::DeviceMesh& mesh,
                   comm::Communicator& ranks, const FullyShardOptions& options);
  ~FullyShardedCore();
  FullyShardedCore(FullyShardedCore&&) noexcept;
  FullyShardedCore& operator=(FullyShardedCore&&) = delete;

  void begin_forward();
  void end_forward();
  // An argument of forward(), in compute_dtype where it is to be.
  template <typename Arg>
  decltype(auto) rounded(Arg&& arg) const {
    if constexpr (std::is_same_v<std::decay_t<Arg>, at::Tensor>) {
      return round(arg);
    } else if constexpr (std::is_same_v<std::decay_t<Arg>,
                                        std::vector<at::Tensor>>) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& each : arg) all.push_back(round(each));
      return all;
    } else {
      return std::forward<Arg>(arg);
    }
  }
  void accumulate(const at::Tensor& loss);
  void backward(const at::Tensor& loss);
  // Of a stage of a pipeline (pipeline.h), from what it gave, whose gradients
  // these are; `is_last`: of the step's.
  void backward(const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& gradients, bool is_last);
  double clip_grad_norm(double most);
  // Of the gradients that count on this rank, in double.
  at::Tensor sum_of_squares() const;
  void scale_gradients(double by);
  comm::Group& world() const;
  int64_t pipeline_stage() const;  // along pp
  // Of micro-batches of a step that failed.
  void drop_accumulated();
  GatheredParameters gather();
  void join(const std::function<void()>& step);
  std::vector<ParameterShard> shards() const;
  std::vector<std::string> units() const;
  ShardedMemory memory_plan(int64_t state_bytes) const;

 private:
  at::Tensor round(const at::Tensor& argument) const;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace wrappers

// Holder: a module holder (GPT) or a std::shared_ptr to a module.
template <typename Holder>
class FullySharded {
 public:
  FullySharded(Holder module, const mesh::DeviceMesh& mesh,
               comm::Communicator& ranks, const FullyShardOptions& options)
      : module_(std::move(module)), core_(*module_, mesh, ranks, options) {}

  template <typename... Args>
  auto forward(Args&&... args) {
    core_.begin_forward();
    auto result = module_->forward(core_.rounded(std::forward<Args>(args))...);
    core_.end_forward();
    return result;
  }
  void accumulate(const at::Tensor& loss) { core_.accumulate(loss); }
  // As loss.backward().
  void backward(const at::Tensor& loss) { core_.backward(loss); }
  // Scales gradients so that their global L2 norm is at most `most`, which may
  // be 0; what it was. Of stages of a pipeline use Schedule::clip_grad_norm().
  // Comm: a word from every rank, and two all_reduces of a double.
  double clip_grad_norm(double most) { return core_.clip_grad_norm(most); }
  // Every rank calls it. What is written to whole parameters while the result
  // lives, or loaded, is kept: each rank's shard from what it wrote.
  wrappers::GatheredParameters gather() { return core_.gather(); }
  // This rank has no more data: takes part in what the others do, with
  // zero weight, until no rank has any. `step` is the rest of a step, what they
  // do between a backward and the next forward but for clip_grad_norm(), and
  // has no word for other ranks: no GradScaler.
  void join(const std::function<void()>& step) { core_.join(step); }

  // In the order of the units.
  std::vector<wrappers::ParameterShard> shards() const {
    return core_.shards();
  }
  // By name; the first, "", has what lies in no other.
  std::vector<std::string> units() const { return core_.units(); }
  // Bytes of this rank, without a step. `state_bytes`: that an optimizer keeps
  // of each element that it updates, of AdamW in fp32 8. Comm: none.
  ShardedMemory memory_plan(int64_t state_bytes = 0) const {
    return core_.memory_plan(state_bytes);
  }
  Holder& module() { return module_; }
  wrappers::FullyShardedCore& core() { return core_; }

 private:
  Holder module_;
  wrappers::FullyShardedCore core_;
};

// `mesh`: of all ranks, along dp_shard, dp_replicate, tp, for a module that is
// cut along it, and pp: each rank then gives the module of its stage, which
// pipeline.h runs. The communicator outlives the result.
template <typename Holder>
FullySharded<Holder> fully_shard(Holder module, const mesh::DeviceMesh& mesh,
                                 comm::Communicator& ranks,
                                 const FullyShardOptions& options = {}) {
  return FullySharded<Holder>(std::move(module), mesh, ranks, options);
}

}  // namespace tessera
