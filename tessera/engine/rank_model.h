// What one rank runs: a model on its place of the mesh, and its programs: of an
// evaluation, and of a step, with gradients and an optimizer, where it trains.
//
// Comm:    construction is collective over the world, and so is a step.
// Errors:  TS_CHECK_CONFIG and TS_CHECK_IO as composing and loading throw them.
// Threads: as comm::Group: one thread a rank.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/engine/model_actor.h"
#include "tessera/engine/run_config.h"
#include "tessera/engine/step_graph.h"
#include "tessera/engine/step_programs.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/compose.h"
#include "tessera/program/executor.h"

namespace tessera::engine {

// What steps take from the data: samples first .. first + count - 1 of a step's
// global batch, and how many of its tokens are targets, and those `depth`
// tokens behind them. Asked of ranks that read (engine/reader.h) alone, of the
// step behind this one too.
using StepBatch =
    std::function<data::Batch(int64_t step, int64_t first, int64_t count)>;
using StepTargets = std::function<int64_t(int64_t step, int64_t depth)>;
// The input of the run's step-th step: a share takes its samples as
// sample_shares.h has them. By its number dropout is drawn. Without `targets`
// every token is one.
StepInput step_input(const RunConfig& config, int64_t step, double lr,
                     const StepBatch& batch, const StepTargets& targets = {});

// How `precision` has the loss scaled.
optim::LossScaleRule loss_scale_rule(parallel::PrecisionConfig precision);

struct SharedSteps;

class RankModel {
 public:
  // For steps and evaluations, or for evaluations alone. What it computes with
  // lies on this thread's device of run.device; batches come there from
  // the host.
  // REQUIRES: a completed configuration, of the latter by
  // complete_for_evaluation().
  RankModel(const RunConfig& config, comm::Communicator& ranks,
            program::Purpose use = program::Purpose::kTraining,
            program::passes::Choice passes = passes_chosen());

  // One step; the observer hears of each instruction. `next`: of the step that
  // follows, whose batch this one may begin where pipeline.schedule goes on;
  // without it the pipeline is empty behind the step, which changes no value.
  // REQUIRES: behind a step with a next one, that step is the next thing done.
  void step(StepInput input, const program::Observer& observer = nullptr,
            std::optional<StepInput> next = {});
  // The same, until the caller has the actor settle it: at once, or behind
  // later steps.
  void run_step(StepInput input, const program::Observer& observer = nullptr,
                std::optional<StepInput> next = {});
  // Whether a step may be given the next one's input.
  bool goes_on() const { return goes_on_; }
  // A GPU has recorded a step, and repeats it (step_graph.h).
  bool repeats_steps() const { return graph_ && graph_->has_recorded(); }
  // Sum of the cross-entropy of one batch, without gradients: each token counts
  // on one of the ranks that hold a model together, for which it is collective.
  // `on_logits`: see StepInput.
  nn::LossSum evaluate(
      const data::Batch& batch, const program::Observer& observer = nullptr,
      const std::function<void(const at::Tensor&)>& on_logits = nullptr);
  // Evaluations measure the averages of the weights, until this is called
  // again; before the first step there are none. REQUIRES: optimizer.ema.
  void swap_averages() {
    if (optimizer_->steps() == 0) return;
    optimizer_->swap_averages();
    release_files();
  }
  // For who calls the decoder's units outside of a program, behind changes.
  void gather_parameters() { composed_.parameters->gather_all(); }

  // What lies in files goes back there: for who touched all of it.
  void release_files() {
    if (files_) files_->release_all();
  }
  // nullptr where zero.offload is none.
  FileMemory* files() const { return files_.get(); }

  models::Model& decoder() { return *decoder_; }
  const mesh::DeviceMesh& mesh() const { return composed_.mesh; }
  const parallel::Composed& composed() const { return composed_; }
  // REQUIRES: a model for steps.
  const optim::Optimizer& optimizer() const { return *optimizer_; }
  ModelActor& actor() { return *actor_; }
  // Of the step that was run last; of one by itself before the first.
  const program::Program& program() const { return *program_; }

 private:
  void build_files();
  void build_model();
  void build_optimizer();
  void build_actor();
  int64_t samples_a_microbatch() const;  // of this rank's share
  std::unique_ptr<SharedSteps> shared_steps();
  void build_programs();
  std::vector<std::shared_ptr<models::Model>> replicas() const;
  bool trains() const { return use_ == program::Purpose::kTraining; }

  const RunConfig& config_;
  comm::Communicator& ranks_;
  const program::Purpose use_;
  const program::passes::Choice passes_;
  std::unique_ptr<FileMemory> files_;  // of zero.offload
  std::shared_ptr<models::Model> decoder_;
  parallel::Composed composed_;
  std::unique_ptr<optim::Optimizer> optimizer_;  // of steps
  std::unique_ptr<ModelActor> actor_;
  bool goes_on_ = false;
  RankPrograms programs_;
  const program::Program* program_ = &programs_.step.alone;
  std::unique_ptr<StepGraph> graph_;  // null: every step is run
};

}  // namespace tessera::engine
