// DeepSpeed's engine around any module: a file of DeepSpeed's says what batch,
// optimizer, learning rate, precision and ZeRO are, and the loop is the same
// whatever it says.
//
//   auto engine = tessera::initialize(net, "ds.json");
//   for (const auto& [input, target] : micro_batches) {
//     const auto loss = loss_of(engine.forward(input), target);
//     engine.backward(loss);
//     engine.step();
//   }
//
// JSON:    a path, or a text that begins with '{': what DeepSpeed takes
//          (engine/deepspeed.h), of which the batch must be there. "auto" is
//          what `settings` say, or Tessera's default.
// Module:  as fully_shard() takes it, in fp32 or wider: with bf16 or fp16 it
//          computes in these over masters of its own type. In both
//          zero_optimization.stage 0 is stage 1, as in DeepSpeed. Each MoE in
//          it (wrappers/moe.h) has the experts and the k that `moe` says, on
//          the mesh_of() the file.
// Batch:   a forward takes train_micro_batch_size_per_gpu samples of this rank;
//          its loss is their mean. gradient_accumulation_steps of forward,
//          backward and step make an update: then step() clips, updates, moves
//          the learning rate on and clears the gradients; before it does
//          nothing.
// fp16:    the loss that backward() is given is scaled (optim/loss_scale.h). A
//          step whose gradients are not finite on some rank updates nothing on
//          any, and the learning rate waits.
// Updates: weight_decay is of all parameters, as DeepSpeed's is of those that
//          it is given; optimizer.groups in `settings` say otherwise. What no
//          rank's loss reached has a gradient of zero.
// Averages: with optimizer.ema in `settings` checkpoints hold them, and
//            { const auto averages = engine.averaged(); ... engine.forward(x) }
//          computes with them.
// Comm:    fully_shard's; in an update two all_reduces of a number; of Muon's
//          matrices those of parallel/data/whole_updates.h.
// Errors:  TS_CHECK_CONFIG for a file that cannot be honoured, as one that
//          offloads to nvme: with the place of the key, the rule and the way
//          out; TS_CHECK for calls in another order, and for a gradient norm
//          that is not finite.
// Threads: as comm::Group: one thread a rank.
#pragma once

#include <string>
#include <utility>

#include "tessera/module_engine/module_engine.h"
#include "tessera/module_engine/started_ranks.h"

namespace tessera {

// Holder: a module holder, or a std::shared_ptr to a module.
template <typename Holder>
class Engine : public ModuleEngine {
 public:
  Engine(Holder module, const std::string& json, comm::Communicator& ranks,
         const InitializeOptions& options)
      : ModuleEngine(*module, json, ranks, options),
        module_(std::move(module)) {}
  Engine(Holder module, const std::string& json, StartedRanks ranks,
         const InitializeOptions& options)
      : ModuleEngine(*module, json, std::move(ranks), options),
        module_(std::move(module)) {}

  template <typename... Args>
  auto forward(Args&&... args) {
    core().begin_forward();
    auto result = module_->forward(core().rounded(std::forward<Args>(args))...);
    core().end_forward();
    return result;
  }
  Holder& module() { return module_; }

 private:
  Holder module_;
};

// On the ranks that a launcher started, or on this one alone.
template <typename Holder>
Engine<Holder> initialize(Holder module, const std::string& json,
                          const InitializeOptions& options = {}) {
  return {std::move(module), json, StartedRanks(), options};
}

// On these, which outlive the result.
template <typename Holder>
Engine<Holder> initialize(Holder module, const std::string& json,
                          comm::Communicator& ranks,
                          const InitializeOptions& options = {}) {
  return {std::move(module), json, ranks, options};
}

}  // namespace tessera
