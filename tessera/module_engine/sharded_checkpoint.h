// Checkpoints of a module in a loop of one's own, however ranks share it: each
// writes a part of what it has, and of what a torch::optim optimizer keeps.
// They load on any number of ranks, shared in any other way.
//
//   tessera::ShardedCheckpoint checkpoint("checkpoints", model, optimizer,
//                                         ranks);
//   int64_t step = 0;
//   if (const auto loaded = checkpoint.load()) step = loaded->step;
//   for (; step < 1000; ++step) { ... }
//   checkpoint.save(step, "my own words");
//
// Modules: `model` is what fully_shard() gave; or a module that is whole on
//          every rank (DistributedDataParallel, DistributedOptimizer), or cut
//          along tp (parallelize(), ColumnParallelLinear); or the stages of a
//          pipeline, each of these kinds: pipe.stages(), schedule.stages().
//          Ranks that hold the same write different tensors of it.
// Form:    checkpoint/checkpoint.h: FOLDER/step-N, written whole or not at all,
//          with checksums; torch.distributed.checkpoint reads its files.
//          "model.NAME" of parameters and buffers, "optimizer.KEY.NAME" of
//          states. Options of the optimizer (lr, betas) are the program's, and
//          so are schedulers and random numbers.
// Names:   those of the whole model, which stages have too that split() made.
// Optimizers: torch::optim's Adam, AdamW, SGD, RMSprop, Adagrad.
// Comm:    every rank makes one, and calls save() and load() with the same
//          arguments, between steps. A few small messages, when it is made one
//          of 24 bytes a tensor from every rank; tensors go through files.
// Errors:  TS_CHECK_IO with file and tensor, after which nothing that was there
//          is lost, and at once for a folder that cannot be written;
//          TS_CHECK_CONFIG for a checkpoint of another module, of another kind
//          of optimizer or of options that keep other states (amsgrad), and for
//          an optimizer of none of these, or of other parameters, for a name
//          that two stages have, for a module that fully_shard() has, given
//          without what that returned, and for experts on several ranks.
//          Thrown on every rank alike.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/pipeline.h"

namespace tessera {

class ShardedCheckpoint {
 public:
  struct Loaded {
    int64_t step = 0;
    std::string client_state;  // of save(), UTF-8
  };

  // `optimizer`: over parameters of this rank's. All outlive the result.
  template <typename Holder>
  ShardedCheckpoint(std::string folder, FullySharded<Holder>& model,
                    torch::optim::Optimizer& optimizer,
                    comm::Communicator& ranks)
      : ShardedCheckpoint(std::move(folder),
                          std::vector<PipelineStage>{
                              {model, model.core().pipeline_stage(), 1}},
                          optimizer, ranks) {}
  // Of a pipeline: all that are on this rank.
  ShardedCheckpoint(std::string folder,
                    const std::vector<PipelineStage>& stages,
                    torch::optim::Optimizer& optimizer,
                    comm::Communicator& ranks);
  // Whole on every rank, or cut along tp; no stage of a pipeline.
  ShardedCheckpoint(std::string folder, torch::nn::Module& module,
                    torch::optim::Optimizer& optimizer,
                    comm::Communicator& ranks);
  ~ShardedCheckpoint();
  ShardedCheckpoint(const ShardedCheckpoint&) = delete;
  ShardedCheckpoint& operator=(const ShardedCheckpoint&) = delete;

  // `keep`: newest checkpoints that stay; 0: all.
  void save(int64_t step, const std::string& client_state = "",
            int64_t keep = 0);
  // The newest good one; or FOLDER itself where it is a step-N. std::nullopt
  // where FOLDER has none: nothing was changed.
  std::optional<Loaded> load();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
