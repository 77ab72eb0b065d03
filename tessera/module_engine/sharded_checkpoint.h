// Checkpoints of a module that fully_shard() shares out, in a loop of one's
// own: each rank writes its shards, and what a torch::optim optimizer keeps of
// them. They load on any number of ranks, in any stage.
//
//   tessera::ShardedCheckpoint checkpoint("checkpoints", model, optimizer,
//                                         ranks);
//   int64_t step = 0;
//   if (const auto loaded = checkpoint.load()) step = loaded->step;
//   for (; step < 1000; ++step) { ... }
//   checkpoint.save(step, "my own words");
//
// Form:    checkpoint/checkpoint.h: FOLDER/step-N, written whole or not at all,
//          with checksums; torch.distributed.checkpoint reads its files.
//          "model.NAME" of parameters and buffers, "optimizer.KEY.NAME" of
//          states. Options of the optimizer (lr, betas) are the program's, and
//          so are schedulers and random numbers.
// Optimizers: torch::optim's Adam, AdamW, SGD, RMSprop, Adagrad.
// Comm:    every rank calls save() and load() with the same arguments, between
//          steps. A few small messages; tensors go through files.
// Errors:  TS_CHECK_IO with file and tensor, after which nothing that was there
//          is lost, and at once for a folder that cannot be written;
//          TS_CHECK_CONFIG for a checkpoint of another module, of another kind
//          of optimizer or of options that keep other states (amsgrad), and for
//          an optimizer of none of these, or of other parameters.
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

namespace tessera {

class ShardedCheckpoint {
 public:
  struct Loaded {
    int64_t step = 0;
    std::string client_state;  // of save()
  };

  // `optimizer`: over shards of this module. All outlive the result.
  template <typename Holder>
  ShardedCheckpoint(std::string folder, FullySharded<Holder>& model,
                    torch::optim::Optimizer& optimizer,
                    comm::Communicator& ranks)
      : ShardedCheckpoint(std::move(folder), *model.module(), model.shards(),
                          optimizer, ranks) {}
  ShardedCheckpoint(std::string folder, const torch::nn::Module& module,
                    std::vector<wrappers::ParameterShard> shards,
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
