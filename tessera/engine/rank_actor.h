// One rank of a mesh: what each instruction of a program does to its part of a
// model.
//
// A unit's graph ends at its own input, whose gradient is handed to the unit
// before: one frame for the boundary of a pipeline stage, ZeRO-3 and
// recomputation.
// Comm: that of the model's strategies and of ShardedParameters; messages
//       between stages, (B, T, D) of each micro-batch each way. Where one rank
//       reads for others, BatchShare's of the next step, and before a program
//       of this one, where nothing has moved it: in the first step, and in one
//       that runs again.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "tessera/engine/batch_share.h"
#include "tessera/engine/model_actor.h"
#include "tessera/nn/weight_queue.h"

namespace tessera::engine {

// Where one rank reads the steps of several.
struct SharedSteps {
  BatchShare share;
  BatchExtent extent;
};

class RankActor final : public ModelActor {
 public:
  RankActor(models::Model& model, parallel::Composed& composed,
            optim::Optimizer* optimizer, comm::Group& world,
            const GradientRules& rules, FileMemory* files = nullptr,
            std::unique_ptr<SharedSteps> steps = nullptr);

  void begin_program(StepInput input, int64_t num_microbatches,
                     program::Purpose purpose,
                     std::optional<StepInput> next = {}) override;
  void load_in_place() override;
  void load_inputs(int64_t microbatch) override;
  void load_targets(int64_t microbatch) override;
  void load_documents(int64_t microbatch) override;
  void forward(int64_t microbatch, int64_t unit) override;
  void recompute(int64_t microbatch, int64_t unit) override;
  void replay(int64_t microbatch, int64_t unit) override;
  void loss(int64_t microbatch) override;
  void backward(program::Op part, int64_t microbatch, int64_t unit) override;
  void hand_activations(int64_t microbatch, int64_t chunk) override;
  void hand_gradients(int64_t microbatch, int64_t chunk) override;
  void begin(const program::Instruction& instruction,
             bool awaited_next) override;
  void await(const program::Instruction& instruction) override;
  void next_version() override;

 private:
  // A unit between its forward and its backward.
  struct Passed {
    at::Tensor input;
    at::Tensor output;
    at::Tensor gradient;  // of the output
    bool keeps = false;   // the output has a graph
    nn::Balance balance = {};
    nn::CoreAgain attention = {};
    // What a first part of a backward leaves to the second.
    c10::intrusive_ptr<nn::WeightQueue> later = {};
  };
  struct Microbatch {
    data::Batch batch;  // this rank's tokens
    // (D, B, T): of depths of prediction beyond the next token.
    at::Tensor inputs_ahead = {}, targets_ahead = {};
    std::vector<Passed> units;
    std::shared_ptr<nn::BatchLoad> load = std::make_shared<nn::BatchLoad>();
  };
  // A message on its way, and its tensor.
  struct Message {
    comm::Work work;
    at::Tensor tensor;
  };

  std::vector<int64_t> open_batch() override;
  Reading reading_of(const StepRead& read) const;
  data::Batch whole_batch(int64_t microbatch) const;
  data::Batch local(const data::Batch& batch) const;
  at::Tensor there(const at::Tensor& tokens) const;
  at::Tensor local_ahead(const at::Tensor& tokens) const;
  void load(int64_t microbatch);
  models::Tokens tokens_of(int64_t microbatch) const;
  // In front of a unit, and the first of a chunk's: what runs in steps alone is
  // passed over elsewhere.
  int64_t unit_before(int64_t unit) const;
  int64_t first_of(const std::vector<int64_t>& chunk) const;
  void take_input(Microbatch& mine, int64_t unit);
  void predict_ahead(Microbatch& mine, int64_t microbatch,
                     const at::Tensor& hidden);
  void run(int64_t microbatch, int64_t unit, bool keeps);
  // (B, T, D) between blocks, uninitialised.
  at::Tensor hidden() const;
  // What a backward starts from: outputs and their gradients.
  struct Start {
    std::vector<at::Tensor> ends, gradients;
  };
  Start start_backward(int64_t microbatch, int64_t unit);
  // Whatever the unit computes with is of the instruction's version.
  void use_parameters(int64_t unit);
  void backward_input(Passed& here, const Start& start, int64_t unit);
  void hand_on(Microbatch& mine, int64_t unit);
  void begin_message(const program::Instruction& message);

  models::Model& model_;
  std::unique_ptr<SharedSteps> steps_;  // null: this rank reads for itself
  std::vector<Microbatch> microbatches_;
  std::vector<data::Batch> places_;  // of micro-batches, see load_in_place()
  using Key = std::tuple<program::Op, int64_t, int64_t>;  // micro-batch, chunk
  std::map<Key, Message> messages_;
};

}  // namespace tessera::engine
