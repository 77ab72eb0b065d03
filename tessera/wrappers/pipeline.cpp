#include "tessera/wrappers/pipeline.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/optim/gradient_norm.h"
#include "tessera/program/passes/pass.h"
#include "tessera/program/schedules/schedule.h"
#include "tessera/wrappers/detail/clip.h"
#include "tessera/wrappers/detail/heard_memory.h"
#include "tessera/wrappers/detail/same_parameters.h"
#include "tessera/wrappers/detail/stage_actor.h"
#include "tessera/wrappers/moe.h"

namespace tessera {

using program::Instruction;
using program::Op;
using program::Program;

namespace {

namespace schedules = program::schedules;

std::string known_names() {
  std::string names;
  for (const auto& each : schedules::all()) {
    if (each.placement == program::Placement::kMirrored || each.delayed) {
      continue;
    }
    names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  return names;
}

schedules::Schedule schedule_of(const std::string& name) {
  const auto known = schedules::names();
  TS_CHECK_CONFIG(std::ranges::count(known, name) > 0,
                  "pipeline: there is no schedule ", name,
                  ". There are: ", known_names(), ".");
  const auto schedule = schedules::named(name);
  TS_CHECK_CONFIG(schedule.placement != program::Placement::kMirrored,
                  "pipeline: ", name,
                  " has two replicas of each stage, whose gradients nothing "
                  "sums around modules of one's own. Use dualpipe_v, which has "
                  "one, or tessera train.");
  TS_CHECK_CONFIG(!schedule.delayed, "pipeline: ", name,
                  " updates weights in the middle of what it runs, and keeps "
                  "two versions of them, which an optimizer of one's own knows "
                  "nothing of. Use 1f1b, or tessera train.");
  return schedule;
}

void check_shape(const schedules::Schedule& schedule,
                 const schedules::Shape& shape) {
  TS_CHECK_CONFIG(shape.chunks >= 1, "pipeline: this rank was given no stage.");
  TS_CHECK_CONFIG(shape.num_microbatches >= 1, "pipeline: num_microbatches is ",
                  shape.num_microbatches,
                  "; a batch has one micro-batch or more.");
  if (schedules::takes(schedule, shape)) return;
  TS_CHECK_CONFIG(
      schedule.exact_chunks == 0 || schedule.exact_chunks == shape.chunks,
      "pipeline: ", schedule.name, " has ", schedule.exact_chunks,
      " stages a rank, and this rank was given ", shape.chunks, ".");
  TS_CHECK_CONFIG(schedule.chunked || shape.chunks == 1,
                  "pipeline: ", schedule.name,
                  " has one stage a rank, and this rank was ", "given ",
                  shape.chunks, ". interleaved takes several.");
  TS_CHECK_CONFIG(!schedule.multiple_of_stages ||
                      shape.num_microbatches % shape.stages == 0,
                  "pipeline: ", schedule.name,
                  " takes micro-batches in groups of the ranks (", shape.stages,
                  "), but num_microbatches is ", shape.num_microbatches,
                  ". Nearest: ",
                  nearest_multiples(shape.num_microbatches, shape.stages), ".");
  TS_CHECK_CONFIG(false, "pipeline: ", schedule.name, " does not take ",
                  shape.stages, " ranks of ", shape.chunks, " stages with ",
                  shape.num_microbatches, " micro-batches.");
}

// The stages that this rank was given are those that the schedule puts here.
void check_places(const std::vector<PipelineStage>& stages,
                  const program::Pipeline& pipeline, int64_t rank) {
  for (int64_t chunk = 0; chunk < pipeline.chunks; ++chunk) {
    const PipelineStage& stage = stages[chunk];
    TS_CHECK_CONFIG(stage.num_stages() == pipeline.num_runs(),
                    "pipeline: stage ", stage.index(), " is one of ",
                    stage.num_stages(), ", but ", pipeline.stages, " ranks of ",
                    pipeline.chunks, " have ", pipeline.num_runs(), ".");
    const int64_t run = pipeline.run_of({rank, chunk});
    TS_CHECK_CONFIG(stage.index() == run, "pipeline: rank ", rank,
                    " of the pipeline was given stage ", stage.index(),
                    " as chunk ", chunk, "; the schedule has stage ", run,
                    " there.");
  }
}

bool is_sharded(const PipelineStage& stage) {
  return stage.sharded() != nullptr;
}

void check_sharded(const std::vector<PipelineStage>& stages,
                   const ScheduleOptions& options) {
  if (std::ranges::none_of(stages, is_sharded)) {
    if (options.replicas == nullptr) return;
    for (const PipelineStage& stage : stages) {
      wrappers::require_no_parts(stage.module(), *options.replicas);
      wrappers::require_whole_gradients(stage.module());
    }
    return;
  }
  TS_CHECK_CONFIG(std::ranges::all_of(stages, is_sharded),
                  "pipeline: some stages of this rank are sharded and some are "
                  "not. Give all of them to fully_shard(), with zero_stage 0 "
                  "those that are to stay whole.");
  TS_CHECK_CONFIG(
      options.replicas == nullptr,
      "pipeline: stages that fully_shard() gave take the mean over "
      "their replicas by themselves. Leave `replicas` out, and give "
      "fully_shard() a mesh with the axes of data.");
}

schedules::Shape shape_of(const std::vector<PipelineStage>& stages,
                          const comm::Group& ranks,
                          const ScheduleOptions& options) {
  return {.stages = ranks.size(),
          .chunks = std::ssize(stages),
          .num_microbatches = options.num_microbatches,
          .reversed = options.reversed};
}

// What every rank was given goes together: all find it, or none.
program::Pipeline agreed_pipeline(const std::vector<PipelineStage>& stages,
                                  comm::Group& ranks,
                                  const ScheduleOptions& options) {
  const auto shape = shape_of(stages, ranks, options);
  const std::string mine = c10::str(
      options.schedule, " with ", shape.num_microbatches, " micro-batches and ",
      shape.chunks, " stages a rank", options.reversed ? "" : ", not reversed",
      std::ranges::any_of(stages, is_sharded) ? ", sharded" : "");
  const std::string first = comm::text_of_rank_0(ranks, mine);
  program::Pipeline pipeline;
  const std::string complaint = comm::first_complaint(
      ranks, comm::complaint_of([&] {
        TS_CHECK_CONFIG(mine == first, "pipeline: this rank has ", mine,
                        ", and the first one ", first,
                        ". Give all ranks the same.");
        const auto schedule = schedule_of(options.schedule);
        check_shape(schedule, shape);
        pipeline = schedules::pipeline_of(schedule, shape);
        check_sharded(stages, options);
        check_places(stages, pipeline, ranks.rank());
      }));
  TS_CHECK_CONFIG(complaint.empty(), complaint);
  return pipeline;
}

// What a loop of one's own does beside: gradients are its optimizer's.
bool is_ours(const Instruction& each) {
  switch (each.op) {
    case Op::kZeroGradients:
    case Op::kNorm:
    case Op::kSumNorm:
    case Op::kClipGradients:
    case Op::kOptimizerStep:
      return false;
    default:
      return true;
  }
}

// Unit u is virtual stage u, as a whole.
program::Units units_of(const program::Pipeline& pipeline, int64_t rank) {
  program::Units units;
  units.alone = pipeline.stages == 1;
  for (int64_t run = 0; run < pipeline.num_runs(); ++run) {
    units.all.push_back({.reads = {run}, .reduced = false});
  }
  for (int64_t chunk = 0; chunk < pipeline.chunks; ++chunk) {
    units.chunks.push_back({pipeline.run_of({rank, chunk})});
  }
  return units;
}

// Parts along tp, and experts, count each on its rank, what is whole once.
void require_uncut(const PipelineStage& stage) {
  for (const auto& [name, moe] : wrappers::mixtures_of(stage.module())) {
    TS_CHECK_CONFIG(moe->peers().size() == 1,
                    "pipeline: clip_grad_norm() of the MoE ", name,
                    ", whose experts lie on ", moe->peers().size(),
                    " ranks. Give the stage to fully_shard(), with zero_stage "
                    "0 or more, which counts each once.");
  }
  for (const auto& item : stage.module().named_parameters()) {
    TS_CHECK_CONFIG(!wrappers::known_share(item.value()),
                    "pipeline: clip_grad_norm() of ", item.key(),
                    ", of which each rank has a part along tp. Give the stage "
                    "to fully_shard(), with zero_stage 0 or more, which counts "
                    "each part once.");
  }
}

bool splits_backward(const Program& program) {
  return std::ranges::any_of(program, [](const Instruction& each) {
    return each.op == Op::kBackwardWeight;
  });
}

void tell_of_batch_norm(const std::vector<PipelineStage>& stages) {
  using torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl,
      torch::nn::BatchNorm3dImpl;
  for (const PipelineStage& stage : stages) {
    for (const auto& each : stage.module().modules()) {
      if (!each->is_training() ||
          (!each->as<BatchNorm1dImpl>() && !each->as<BatchNorm2dImpl>() &&
           !each->as<BatchNorm3dImpl>())) {
        continue;
      }
      log::info("pipeline: BatchNorm in stage ", stage.index(),
                " sees a micro-batch at a time, and so do its statistics. "
                "SyncBatchNorm takes those of all replicas together");
      return;
    }
  }
}

}  // namespace

struct Schedule::Impl {
  Impl(std::vector<PipelineStage> given, comm::Group& group,
       const ScheduleOptions& asked);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result run(const at::Tensor& inputs, const at::Tensor& targets, bool trains);
  void check_batch(const at::Tensor& batch, const char* what) const;
  bool announce(const at::Tensor& inputs);
  void check_batches(const at::Tensor& inputs, const at::Tensor& targets,
                     bool trains);
  double loss_everywhere(double loss);
  void average_gradients();
  double clip(double most);

  const std::vector<PipelineStage> stages;
  comm::Group& ranks;
  const ScheduleOptions options;
  program::Pipeline pipeline;
  Program training, evaluation;
  wrappers::StageActor actor;
  std::optional<wrappers::Shapes> announced;  // of the batch
  std::string cut;  // what clip() refuses, on every rank
  bool told_of_batch_norm = false;
};

Schedule::Impl::Impl(std::vector<PipelineStage> given, comm::Group& group,
                     const ScheduleOptions& asked)
    : stages(std::move(given)),
      ranks(group),
      options(asked),
      pipeline(agreed_pipeline(stages, ranks, options)),
      actor(stages, pipeline, ranks, options) {
  const auto schedule = schedule_of(options.schedule);
  const auto shape = shape_of(stages, ranks, options);
  const program::Units units = units_of(pipeline, group.rank());
  training = program::passes::lower(
      schedules::step(schedule, shape, group.rank(),
                      {.clip = false, .alone = units.alone}),
      units);
  cut = comm::first_complaint(ranks, comm::complaint_of([&] {
                                for (const auto& stage : stages) {
                                  if (!stage.sharded()) require_uncut(stage);
                                }
                              }));
  std::erase_if(training, [](const Instruction& i) { return !is_ours(i); });
  if (std::ranges::any_of(stages, is_sharded) && splits_backward(training)) {
    log::info("pipeline: stages are sharded: their backward is one part, and ",
              options.schedule, " leaves nothing of it for later");
  }
  evaluation = program::passes::lower(
      schedules::evaluation(shape, group.rank(), schedule.placement), units,
      program::Purpose::kEvaluation);
}

void Schedule::Impl::check_batch(const at::Tensor& batch,
                                 const char* what) const {
  TS_CHECK(batch.defined(), "pipeline: this rank needs ", what,
           ", which are undefined.");
  const int64_t m = options.num_microbatches;
  TS_CHECK(batch.dim() > 0 && batch.size(0) > 0 && batch.size(0) % m == 0,
           "pipeline: ", what, " are ", batch.sizes(), ", whose dim 0 ", m,
           " micro-batches do not share out evenly. Nearest: ",
           nearest_multiples(batch.dim() > 0 ? batch.size(0) : 0, m), ".");
}

// Whether inputs have other sizes than before: the first rank says it to all.
bool Schedule::Impl::announce(const at::Tensor& inputs) {
  at::Tensor message = wrappers::Shapes::empty_message();
  if (ranks.rank() == 0 && inputs.defined()) {
    message = wrappers::Shapes::of({inputs}).to_message();
  }
  if (ranks.size() > 1) ranks.broadcast(message, /*root=*/0).synchronize();
  auto shapes = wrappers::Shapes::from_message(message);
  if (announced && *announced == shapes) return false;
  announced = std::move(shapes);
  return true;
}

// On every rank alike, before anything is done.
void Schedule::Impl::check_batches(const at::Tensor& inputs,
                                   const at::Tensor& targets, bool trains) {
  const int64_t rank = ranks.rank();
  const std::string complaint = comm::first_complaint(
      ranks, comm::complaint_of([&] {
        if (pipeline.is_first({rank, 0})) check_batch(inputs, "inputs");
        TS_CHECK(!trains || options.loss,
                 "pipeline: step() needs ScheduleOptions::loss.");
        if (!pipeline.is_last({rank, pipeline.chunks - 1})) return;
        if (!trains && !targets.defined()) return;
        check_batch(targets, "targets");
        const auto& all = announced->all;
        if (all.empty() || all[0].sizes.empty()) return;
        TS_CHECK(targets.size(0) == all[0].sizes[0],
                 "pipeline: targets are of ", targets.size(0),
                 " samples and inputs of ", all[0].sizes[0], ".");
      }));
  if (complaint.empty()) return;
  announced.reset();
  TS_CHECK(false, complaint);
}

double Schedule::Impl::loss_everywhere(double loss) {
  if (ranks.size() == 1) return loss;
  at::Tensor number = at::full({1}, loss, at::kDouble);
  const int64_t last = pipeline.place_of(pipeline.num_runs() - 1).stage;
  ranks.broadcast(number, last).synchronize();
  return number.item<double>();
}

void Schedule::Impl::average_gradients() {
  if (options.replicas == nullptr || options.replicas->size() == 1) return;
  for (const PipelineStage& stage : stages) {
    for (const at::Tensor& parameter : stage.module().parameters()) {
      if (!parameter.requires_grad()) continue;
      at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) gradient = at::zeros_like(parameter);
      const at::Tensor whole = gradient.contiguous();
      options.replicas
          ->all_reduce(whole, comm::ReduceOp::kMean, comm::Mode::kBlocking)
          .wait();
      if (!whole.is_same(gradient)) gradient.copy_(whole);
    }
  }
}

double Schedule::Impl::clip(double most) {
  TS_CHECK_CONFIG(cut.empty(), cut);
  const at::NoGradGuard no_grad;
  at::Tensor squares = at::zeros({1}, at::kDouble);
  std::vector<at::Tensor> parameters, whole;
  for (const PipelineStage& stage : stages) {
    if (stage.sharded()) {
      squares += stage.sharded()->sum_of_squares();
      continue;
    }
    const auto own = stage.module().parameters();
    parameters.insert(parameters.end(), own.begin(), own.end());
  }
  for (const at::Tensor& each : wrappers::distinct(parameters)) {
    if (each.grad().defined()) whole.push_back(each.grad());
  }
  squares += optim::sum_of_squares(whole).reshape({1});
  comm::Group& all = stages[0].sharded() ? stages[0].sharded()->world() : ranks;
  all.all_reduce(squares).synchronize();
  const double norm = std::sqrt(squares.item<double>());
  const double scale = wrappers::scale_within(norm, most);
  optim::scale_gradients(whole, scale);
  for (const PipelineStage& stage : stages) {
    if (stage.sharded()) stage.sharded()->scale_gradients(scale);
  }
  return norm;
}

Schedule::Result Schedule::Impl::run(const at::Tensor& inputs,
                                     const at::Tensor& targets, bool trains) {
  const bool announces = announce(inputs);
  check_batches(inputs, targets, trains);
  if (trains && !std::exchange(told_of_batch_norm, true)) {
    tell_of_batch_norm(stages);
  }
  actor.begin_program(inputs, targets, trains, announces);
  program::execute(trains ? training : evaluation, actor);
  Result result = actor.end_program();
  if (trains) average_gradients();
  result.loss = loss_everywhere(result.loss);
  return result;
}

Schedule::Schedule(std::vector<PipelineStage> stages, comm::Group& ranks,
                   const ScheduleOptions& options)
    : impl_(std::make_unique<Impl>(std::move(stages), ranks, options)) {}
Schedule::~Schedule() = default;
Schedule::Schedule(Schedule&&) noexcept = default;

Schedule::Result Schedule::step(const at::Tensor& inputs,
                                const at::Tensor& targets) {
  return impl_->run(inputs, targets, /*trains=*/true);
}

Schedule::Result Schedule::eval(const at::Tensor& inputs,
                                const at::Tensor& targets) {
  return impl_->run(inputs, targets, /*trains=*/false);
}

double Schedule::clip_grad_norm(double most) { return impl_->clip(most); }

const std::vector<PipelineStage>& Schedule::stages() const {
  return impl_->stages;
}

bool Schedule::is_first() const {
  return impl_->pipeline.is_first({impl_->ranks.rank(), 0});
}

bool Schedule::is_last() const {
  const auto& pipeline = impl_->pipeline;
  return pipeline.is_last({impl_->ranks.rank(), pipeline.chunks - 1});
}

std::string Schedule::describe() const {
  return program::describe(impl_->training);
}

}  // namespace tessera
