#include "tessera/engine/model_actor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/host_read.h"

namespace tessera::engine {

using program::Instruction;
using program::Op;

namespace {

constexpr const char* kWhatMayHelp =
    "; the weights were not changed by this step. A smaller optimizer.lr, a "
    "longer schedule.warmup or optimizer.clip_norm, lower if there is one, may "
    "help; a checkpoint that was written is whole.";

// Of a step's global batch, by depth.
std::vector<int64_t> targets_of(const StepInput& input) {
  std::vector<int64_t> counts;
  for (int64_t depth = 0; depth <= input.depths; ++depth) {
    counts.push_back(input.read.num_targets(depth));
  }
  return counts;
}

// NaN without the sign that it happens to have.
double shown(double number) {
  return std::isnan(number) ? std::fabs(number) : number;
}

}  // namespace

void require_finite(double grad_norm) {
  TS_CHECK(std::isfinite(grad_norm), "train: the gradient's norm is ",
           grad_norm, kWhatMayHelp);
}

int64_t part_in_files(Op fetch, int64_t unit) {
  return 2 * unit + (fetch == Op::kFetchStates ? 1 : 0);
}

ModelActor::ModelActor(parallel::Composed& composed,
                       optim::Optimizer* optimizer, comm::Group& world,
                       const GradientRules& rules, FileMemory* files)
    : composed_(composed),
      optimizer_(optimizer),
      world_(world),
      files_(files),
      updates_read_there_(optimizer != nullptr && optimizer->reads_there()),
      rules_(rules),
      loss_scale_(rules.loss_scale) {}

void ModelActor::begin_program(StepInput input, int64_t num_microbatches,
                               program::Purpose purpose,
                               std::optional<StepInput> next) {
  TORCH_INTERNAL_ASSERT(
      !is_ahead_ || purpose == program::Purpose::kTraining,
      "an evaluation in the middle of a batch: its step is to end first");
  input_ = std::move(input);
  const bool was_ahead = std::exchange(is_ahead_, next.has_value());
  next_ = std::move(next).value_or(StepInput());
  num_microbatches_ = num_microbatches;
  purpose_ = purpose;
  version_ = 0;
  if (!was_ahead) counted_ = {};
  settled_ = {};
  unread_ = at::Tensor();
  updates_ = was_skipped_ = normed_ = false;
  scale_ = input_.scale.value_or(trains() ? loss_scale_.value() : 1);
  gradient_scale_ = 1 / scale_;
  input_.aux_scale *= scale_;
  next_.aux_scale *= scale_;
  if (!trains()) return;
  target_tokens_ = was_ahead ? next_target_tokens_ : open_batch();
  if (is_ahead_) next_target_tokens_ = targets_of(next_);
}

std::vector<int64_t> ModelActor::open_batch() { return targets_of(input_); }

std::optional<double> ModelActor::gradient_factor(int64_t microbatch) const {
  if (!trains()) return std::nullopt;
  return scale_ / target_tokens_of(microbatch, /*depth=*/0);
}

// Of a depth's summed loss in the mean over depths. A batch may have no target
// so far ahead.
double ModelActor::share_of_depth(int64_t microbatch, int64_t depth) const {
  const double tokens = target_tokens_of(microbatch, depth);
  const auto depths = static_cast<double>(input_of(microbatch).depths);
  return tokens > 0 ? 1 / (depths * tokens) : 0;
}

double ModelActor::ahead_factor(int64_t microbatch, int64_t depth) const {
  return scale_ * input_of(microbatch).ahead_weight *
         share_of_depth(microbatch, depth);
}

bool ModelActor::may_skip() const {
  return rules_.skips_nonfinite || loss_scale_.scales();
}

void ModelActor::zero_gradients() {
  composed_.parameters->zero_gradients(version_);
}

void ModelActor::count(const nn::LossSum& loss, int64_t microbatch) {
  counted_of(microbatch)
      .losses.push_back(
          {in_batch(microbatch), {loss.sum.detach(), loss.weight.detach()}});
}

void ModelActor::count_ahead(const nn::LossSum& loss, int64_t microbatch,
                             int64_t depth) {
  counted_of(microbatch)
      .ahead.push_back(loss.sum.detach() * share_of_depth(microbatch, depth));
}

void ModelActor::count(const nn::Balance& balance, int64_t microbatch) {
  if (!balance.loss.defined()) return;
  Counted& counted = counted_of(microbatch);
  counted.balances.push_back(balance.loss);
  at::Tensor& counts = counted.expert_counts;
  counts = counts.defined() ? counts + balance.counts : balance.counts;
}

nn::LossSum ModelActor::losses() const {
  nn::LossSum all{at::zeros({}, at::kDouble), at::zeros({}, at::kDouble)};
  for (const auto& [microbatch, loss] : counted_.losses) {
    all.sum = all.sum + loss.sum;
    all.weight = all.weight + loss.weight;
  }
  return all;
}

bool ModelActor::reads_behind() const {
  return !may_skip() && !input_.again && files_ == nullptr &&
         !composed_.updates && !rules_.scaling.normalizes &&
         updates_read_there_;
}

void ModelActor::read() {
  std::vector<at::Tensor> all;
  const auto add = [&](const at::Tensor& numbers) {
    all.push_back(numbers.to(at::kDouble).reshape({-1}));
  };
  add(squares_);
  for (const auto& [microbatch, loss] : counted_.losses) {
    add(loss.sum);
    add(loss.weight);
  }
  for (const auto& balance : counted_.balances) add(balance);
  for (const auto& loss : counted_.ahead) add(loss);
  if (counted_.expert_counts.defined()) add(counted_.expert_counts);
  unread_ = at::cat(all);
  if (!reads_behind()) settle();
}

// The one read of a step.
void ModelActor::settle() {
  if (!unread_.defined()) return;
  settle(read_on_host(std::exchange(unread_, {})), counted_);
}

ModelActor::Unread ModelActor::begin_to_settle() {
  TORCH_INTERNAL_ASSERT(!may_skip(), "a step by whose norm the next one goes");
  if (!unread_.defined()) return {.settled = settled_};
  return {.numbers = HostRead(std::exchange(unread_, {})), .counted = counted_};
}

void ModelActor::settle(Unread&& of) {
  settled_ = std::move(of.settled);
  if (of.numbers) return settle(of.numbers->wait(), of.counted);
  was_skipped_ = !std::isfinite(settled_.grad_norm);
}

void ModelActor::settle(const at::Tensor& here, const Counted& of) {
  const double* next = here.const_data_ptr<double>();
  settled_.grad_norm = shown(std::sqrt(*next++)) / scale_;
  for (const auto& [microbatch, loss] : of.losses) {
    const double sum = *next++;
    TS_CHECK(!throws_nonfinite() || std::isfinite(sum),
             "train: the loss of micro-batch ", microbatch, " is ", shown(sum),
             kWhatMayHelp);
    settled_.loss_sum += sum;
    settled_.weight += *next++;
  }
  for (size_t i = 0; i < of.balances.size(); ++i) settled_.aux_sum += *next++;
  for (size_t i = 0; i < of.ahead.size(); ++i) settled_.ahead_loss += *next++;
  if (const at::Tensor& counts = of.expert_counts; counts.defined()) {
    settled_.expert_counts =
        here.slice(0, here.numel() - counts.numel()).view_as(counts);
  }
  decide();
}

// Alike on all ranks.
void ModelActor::decide() {
  if (throws_nonfinite()) require_finite(settled_.grad_norm);
  const bool is_finite = std::isfinite(settled_.grad_norm);
  was_skipped_ = input_.again || !is_finite;
  if (!input_.again) loss_scale_.update(is_finite);
}

std::vector<std::string> ModelActor::nonfinite_parameters() const {
  std::vector<std::string> names;
  for (const auto& parameter : composed_.parameters->trained()) {
    const bool is_finite = at::isfinite(parameter.gradient).all().item<bool>();
    if (!is_finite) names.push_back(parameter.name);
  }
  return names;
}

// Every element of the model counts on one rank.
void ModelActor::norm() {
  normed_ = true;
  composed_.parameters->complete_gradients(version_);
  std::vector<at::Tensor> owned;
  for (const auto& parameter : composed_.parameters->trained()) {
    if (parameter.balances_load) continue;
    if (parameter.layout.owned_by(composed_.coord)) {
      owned.push_back(parameter.gradient);
    }
  }
  squares_ = optim::sum_of_squares(owned).reshape({1}).to(
      composed_.activations.device());
  // One that reads before it updates, and holds all losses, needs no guard.
  const bool is_guarded =
      !throws_nonfinite() || rules_.guards_losses || world_.size() > 1;
  for (const auto& [microbatch, loss] : counted_.losses) {
    if (is_guarded) squares_ = squares_ + loss.sum * 0;  // NaN unless finite
  }
  for (const auto& loss : counted_.ahead) {
    if (is_guarded) squares_ = squares_ + loss * 0;
  }
  if (world_.size() == 1) read();
}

void ModelActor::begin(const Instruction& instruction, bool awaited_next) {
  const auto mode = awaited_next ? comm::Mode::kBlocking : comm::Mode::kAsync;
  auto& parameters = *composed_.parameters;
  switch (instruction.op) {
    case Op::kGatherParameters:
      return parameters.begin_gather(instruction.unit, mode, version_);
    case Op::kReduceGradients:
      return parameters.begin_reduction(instruction.unit, mode, version_);
    case Op::kSumGradients:
      return parameters.begin_sum(instruction.unit, mode, version_);
    case Op::kSumNorm:
      norm_work_ = world_.all_reduce(squares_, comm::ReduceOp::kSum, mode);
      return;
    case Op::kGatherUpdates:
      if (was_skipped_) return;
      begin_updates();
      return composed_.updates->begin_gather(
          instruction.unit, [&](size_t i) { return optimizer_->piece(i); },
          mode);
    case Op::kFetchStates:
    case Op::kFetchParameters:
      return fetch(instruction);
    default:
      TORCH_INTERNAL_ASSERT(false, "this actor sends and receives nothing");
  }
}

void ModelActor::await(const Instruction& instruction) {
  auto& parameters = *composed_.parameters;
  switch (instruction.op) {
    case Op::kGatherParameters:
      wrote_parameters(instruction.unit);
      return parameters.await_gather(instruction.unit, version_);
    case Op::kReduceGradients:
      return parameters.await_reduction(instruction.unit, version_);
    case Op::kSumGradients:
      return parameters.await_sum(instruction.unit, version_);
    case Op::kSumNorm:
      std::exchange(norm_work_, {}).wait();
      return read();
    case Op::kGatherUpdates:
      if (was_skipped_) return;
      return composed_.updates->await_gather(instruction.unit);
    case Op::kFetchStates:
    case Op::kFetchParameters:
      return files_->await(part_in_files(instruction.op, instruction.unit));
    default:
      TORCH_INTERNAL_ASSERT(false, "this actor sends and receives nothing");
  }
}

// The updates that follow read gradients so: no pass over them.
void ModelActor::clip_gradients() {
  if (reads_behind()) return;  // see begin_updates()
  gradient_scale_ = rules_.scaling.of(settled_.grad_norm) / scale_;
}

void ModelActor::begin_updates() {
  if (std::exchange(updates_, true)) return;
  if (!reads_behind()) return optimizer_->begin_step(gradient_scale_);
  optimizer_->begin_step(
      1 / scale_,
      optim::clip_scale_there(squares_, 1 / scale_, rules_.scaling.clip_norm),
      is_recorded_);
}

bool ModelActor::can_repeat() const {
  return trains() && reads_behind() && !is_ahead_;
}

void ModelActor::begin_recording() {
  is_recorded_ = true;
  optimizer_->send_pace(input_.lr);
}

ModelActor::Repeated ModelActor::end_recording() {
  is_recorded_ = false;
  return {.counted = counted_, .unread = unread_};
}

void ModelActor::give_up_recording() {
  is_recorded_ = false;
  if (updates_) optimizer_->take_back_step();
}

void ModelActor::begin_repeated(const Repeated& recorded) {
  counted_ = recorded.counted;
  unread_ = recorded.unread;
  optimizer_->send_pace(input_.lr);
  optimizer_->count_repeated_step();
}

// Parameters lie unit by unit, and so do the optimizer's segments.
std::pair<size_t, size_t> ModelActor::segments_of(int64_t unit) const {
  const auto& all = composed_.parameters->trained();
  if (unit < 0) return {0, all.size()};
  const auto [first, last] = std::ranges::equal_range(
      all, unit, {}, &parallel::data::LocalParameter::unit);
  return {first - all.begin(), last - all.begin()};
}

void ModelActor::optimizer_step(int64_t unit) {
  if (was_skipped_) return;
  begin_updates();
  const auto [first, last] = segments_of(unit);
  wrote_parameters(unit);
  optimizer_->step(input_.lr, first, last - first, [this](size_t i) {
    return composed_.updates->whole_of(*optimizer_, i);
  });
  if (composed_.updates) composed_.updates->free(unit);
}

// Nothing is updated where the step is known to be skipped; what was fetched
// before goes back.
void ModelActor::fetch(const Instruction& instruction) {
  if (was_skipped_) return;
  const bool updates = instruction.op == Op::kFetchStates || normed_;
  files_->fetch(part_in_files(instruction.op, instruction.unit),
                updates ? FileMemory::Use::kWrite : FileMemory::Use::kRead);
}

void ModelActor::wrote_parameters(int64_t unit) {
  if (!composed_.units.offloads_parameters) return;
  files_->note_written(part_in_files(Op::kFetchParameters, unit));
}

void ModelActor::release(const Instruction& instruction) {
  files_->release(
      part_in_files(program::fetch_of(instruction.op), instruction.unit));
}

void ModelActor::free_parameters(int64_t unit) {
  composed_.parameters->free(unit, version_);
}

void ModelActor::allocate_gradients(int64_t unit) {
  composed_.parameters->allocate_gradients(unit, version_);
}

void ModelActor::keep_parameters(int64_t unit) {
  composed_.parameters->keep(unit);
}

void ModelActor::next_version() {
  settle();
  composed_.parameters->next_version();
  counted_ = std::exchange(counted_ahead_, {});
}

}  // namespace tessera::engine
