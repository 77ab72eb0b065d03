// What actors that run a model have in common: sums, the norm, the update.
//
// Shapes: a micro-batch's inputs and targets: (B, T) of int64.
// Loss:   the sum of cross-entropies over the target tokens of the global
//         batch, divided once by their number: gradients need no scale of
//         micro-batch or rank. So with the auxiliary loss of experts, over
//         samples and layers, and with the loss of each depth of multi-token
//         prediction, over its own targets.
// Host:   losses, their counts, the norm and the balance of experts stay on the
//         device until the norm is known: then the host reads them, all at
//         once, and decides by them whether anything is updated, and clips.
// Scale:  losses are multiplied by the loss scale where they become gradients,
//         once, at the head; the norm, and the factor with which updates read
//         gradients, are divided by it.
// Skips:  a norm that is not finite is so on every rank of every axis, being
//         one sum over all: each then updates nothing, or ends. It is NaN
//         beside a loss that is not finite, which other ranks may not hold.
// Ahead:  a program that goes on (program/schedules/schedule.h) has begun the
//         next batch when it ends: what is known of that, and counted, waits
//         for the program that ends it.
// Comm:   the norm is one all_reduce of a double over the world.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/file_memory.h"
#include "tessera/core/host_read.h"
#include "tessera/data/dataset.h"
#include "tessera/engine/traffic.h"
#include "tessera/models/model.h"
#include "tessera/nn/dropout.h"
#include "tessera/optim/gradient_norm.h"
#include "tessera/optim/loss_scale.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/compose.h"
#include "tessera/program/executor.h"

namespace tessera::engine {

// What a step takes from the data, asked of ranks that read alone. `share`
// counts those that see other samples: ranks of the data-parallel group, or
// devices.
struct StepRead {
  std::function<data::Batch(int64_t share, int64_t microbatch)> load;
  // Of the global batch: of the next token, and `depth` tokens behind it.
  std::function<int64_t(int64_t depth)> num_targets = {};
};

// What a step needs beside the model.
struct StepInput {
  StepRead read;
  // Of the step behind it, which travels while this one runs where one rank
  // reads for others; none: it is the last one.
  std::optional<StepRead> next = {};
  int64_t step = 0;      // of the run, from 0
  int64_t samples = 0;   // of a micro-batch
  int64_t tokens = 0;    // of a sample, on this rank
  double aux_scale = 0;  // of nn::Balance::penalty in the step's loss
  // Of a step: depths of prediction beyond the next token, and what the mean of
  // their losses weighs in its loss.
  int64_t depths = 0;
  double ahead_weight = 0;
  double lr = 0;
  // Of a step: what dropout is drawn by. None in an evaluation.
  std::function<nn::Draw(int64_t share, int64_t microbatch)> draw = {};
  // To see what it does: nothing is updated, nor the loss's scale, which is
  // this one, or what it is now.
  bool again = false;
  std::optional<double> scale = {};
  int64_t unpadded = 0;  // of an evaluation: see data::Batch
  // Of an evaluation of a text that is being written, of which experts drop
  // nothing: hears the logits (B, T, V) that are here.
  std::function<void(const at::Tensor& logits)> on_logits = {};
};

// What becomes of gradients beside the optimizer's rule.
struct GradientRules {
  optim::GradientScaling scaling = {};
  optim::LossScaleRule loss_scale = {};
  bool skips_nonfinite = false;  // also where the loss is not scaled
  // A loss that is not finite makes the norm so on one rank too, as on several
  // it always does: where it updates before the host has read.
  bool guards_losses = false;
};

// Throws where a gradient's norm is not finite.
void require_finite(double grad_norm);

// The part of a unit that a fetch is of.
int64_t part_in_files(program::Op fetch, int64_t unit);

class ModelActor : public program::Actor {
 public:
  // Without an optimizer for evaluations alone. `files`: what states lie in,
  // by part_in_files(); null: none do.
  ModelActor(parallel::Composed& composed, optim::Optimizer* optimizer,
             comm::Group& world, const GradientRules& rules,
             FileMemory* files = nullptr);

  // Before a program runs: a step's, or an evaluation's, without gradients.
  // `next`: of the batch that the program begins besides, whose step is the one
  // that follows. REQUIRES: an evaluation is not in the middle of a batch.
  virtual void begin_program(StepInput input, int64_t num_microbatches,
                             program::Purpose purpose,
                             std::optional<StepInput> next = {});
  // A batch has begun whose step is still to come.
  bool is_ahead() const { return is_ahead_; }

  // Behind a program: the host's read of it, if that was not yet. Where a loss
  // or the norm is not finite no weight has changed by it, and it throws.
  void settle();
  // The same in two parts, with programs of later steps between them. REQUIRES:
  // monitor.losses_late allows it.
  struct Unread;
  Unread begin_to_settle();
  void settle(Unread&& of);

  // Of the step that was settled last: this rank's part of the loss, and of the
  // target tokens that it is a sum over; each rank of tp has the same.
  double loss_sum() const { return settled_.loss_sum; }
  double weight() const { return settled_.weight; }
  // Its part of nn::Balance, of all layers and micro-batches.
  double aux_sum() const { return settled_.aux_sum; }
  // Its part of the mean over depths of the losses of multi-token prediction.
  double ahead_loss() const { return settled_.ahead_loss; }
  // nn::Balance's, on the host.
  const at::Tensor& expert_counts() const { return settled_.expert_counts; }
  // Global L2 norm before it was clipped or normalised.
  double grad_norm() const { return settled_.grad_norm; }
  // From now on a step is skipped whose norm is not finite; where a loss is
  // not, the norm of all ranks is not. Who called looks at was_skipped(), and
  // may end the run.
  void leave_nonfinite() { leaves_nonfinite_ = true; }
  // By which its loss was multiplied.
  double scale() const { return scale_; }
  // A step without a finite gradient is no end: it was asked for, or a scale is
  // being found.
  bool may_skip() const;
  // It updated nothing; the parameters whose gradients here are not finite.
  bool was_skipped() const { return was_skipped_; }
  std::vector<std::string> nonfinite_parameters() const;
  // Of the next step.
  optim::LossScale& loss_scale() { return loss_scale_; }
  // What the step moved outside of any group, on the busiest device.
  virtual Traffic traffic() const { return {}; }
  // Of an evaluation, where nothing is read: the same two, on the device. Each
  // token counts on one of the ranks that hold a model.
  nn::LossSum losses() const;

  // Steps that a device repeats as it recorded one (step_graph.h): between
  // begin_program() and settle(), in place of a program's run.
  //
  // What of a step lies where the device puts it again.
  struct Repeated;
  // Whether the host decides nothing in the step that has begun.
  bool can_repeat() const;
  // Numbers of the host that a recorded step has in it: with others it is
  // recorded anew.
  struct Numbers {
    std::vector<int64_t> target_tokens;
    double scale = 1;
    bool operator==(const Numbers&) const = default;
  };
  Numbers numbers() const { return {target_tokens_, scale_}; }
  // Its micro-batches, where those of other such steps have lain.
  virtual void load_in_place() {}
  void begin_recording();
  Repeated end_recording();
  // The step is to be begun again.
  void give_up_recording();
  void begin_repeated(const Repeated& recorded);

  void use_version(int64_t version) override { version_ = version; }
  void zero_gradients() override;
  void norm() override;
  void begin(const program::Instruction& instruction,
             bool awaited_next) override;
  void await(const program::Instruction& instruction) override;
  void clip_gradients() override;
  void keep_parameters(int64_t unit) override;
  void optimizer_step(int64_t unit) override;
  void next_version() override;
  void release(const program::Instruction& instruction) override;
  void free_parameters(int64_t unit) override;
  void allocate_gradients(int64_t unit) override;

 protected:
  // Keep them until the host reads.
  void count(const nn::LossSum& loss, int64_t microbatch);
  void count(const nn::Balance& balance, int64_t microbatch);
  void count_ahead(const nn::LossSum& loss, int64_t microbatch, int64_t depth);
  std::optional<nn::Draw> draw_of(int64_t share, int64_t microbatch) const {
    const StepInput& input = input_of(microbatch);
    if (!input.draw) return std::nullopt;
    return input.draw(share, in_batch(microbatch));
  }
  // Micro-batches are counted on from the step's into the next one's.
  bool is_of_next(int64_t microbatch) const {
    return microbatch >= num_microbatches_;
  }
  const StepInput& input_of(int64_t microbatch) const {
    return is_of_next(microbatch) ? next_ : input_;
  }
  // Of the global batch, `depth` tokens behind the next one.
  double target_tokens_of(int64_t microbatch, int64_t depth) const {
    const auto& all =
        is_of_next(microbatch) ? next_target_tokens_ : target_tokens_;
    return static_cast<double>(all.at(depth));
  }
  int64_t in_batch(int64_t microbatch) const {
    return microbatch % num_microbatches_;
  }
  bool trains() const { return purpose_ == program::Purpose::kTraining; }
  // Of a micro-batch's summed loss in the step's, and scaled; of an evaluation,
  // which asks for no gradient, none.
  std::optional<double> gradient_factor(int64_t microbatch) const;
  // Of that of a depth of multi-token prediction, from 1, in a step.
  double ahead_factor(int64_t microbatch, int64_t depth) const;
  // Makes the step's samples ready to be loaded, and counts the targets of the
  // global batch, by depth.
  virtual std::vector<int64_t> open_batch();

  parallel::Composed& composed_;
  StepInput input_;
  StepInput next_;  // of the batch behind, where a program begins that
  int64_t num_microbatches_ = 0;
  int64_t version_ = 0;  // that the instruction is of

 private:
  // Of one batch, until the host reads.
  struct Counted {
    std::vector<std::pair<int64_t, nn::LossSum>> losses;  // of a micro-batch
    std::vector<at::Tensor> balances;
    std::vector<at::Tensor> ahead;  // parts of ahead_loss()
    at::Tensor expert_counts;
  };
  // Of a step, as the host has read it.
  struct Settled {
    double loss_sum = 0, weight = 0, aux_sum = 0, ahead_loss = 0, grad_norm = 0;
    at::Tensor expert_counts;
  };
  Counted& counted_of(int64_t microbatch) {
    return is_of_next(microbatch) ? counted_ahead_ : counted_;
  }
  bool throws_nonfinite() const { return !may_skip() && !leaves_nonfinite_; }
  double share_of_depth(int64_t microbatch, int64_t depth) const;
  // Where updates heed the norm on their device, the host reads it behind them.
  bool reads_behind() const;
  void settle(const at::Tensor& here, const Counted& of);
  void decide();
  void read();
  // Segments [first, last) of the optimizer: all of a unit, or of the model.
  std::pair<size_t, size_t> segments_of(int64_t unit) const;
  void begin_updates();
  void fetch(const program::Instruction& instruction);
  void wrote_parameters(int64_t unit);

  optim::Optimizer* optimizer_;
  comm::Group& world_;
  FileMemory* files_;
  const bool updates_read_there_;
  const GradientRules rules_;
  optim::LossScale loss_scale_;
  program::Purpose purpose_ = program::Purpose::kTraining;
  Counted counted_, counted_ahead_;
  bool is_ahead_ = false;
  at::Tensor unread_;   // of a step, for settle()
  at::Tensor squares_;  // this rank's part of the squared norm; then the sum
  comm::Work norm_work_;
  // Of global batches, by depth.
  std::vector<int64_t> target_tokens_, next_target_tokens_;
  bool normed_ = false;   // the norm is taken
  bool updates_ = false;  // the optimizer's step has begun
  bool leaves_nonfinite_ = false;
  bool is_recorded_ = false;   // what the device is asked for
  double gradient_scale_ = 1;  // in it, as the norm says
  double scale_ = 1;           // of the loss
  bool was_skipped_ = false;
  Settled settled_;
};

struct ModelActor::Unread {
  std::optional<HostRead> numbers;  // none: the host has read them
  Counted counted;
  Settled settled;
};

struct ModelActor::Repeated {
  Counted counted;
  at::Tensor unread;
};

}  // namespace tessera::engine
