#include "tessera/engine/rank_model.h"

#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/peft_folder.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/memory_kind.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/rank_actor.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/run_devices.h"
#include "tessera/engine/sample_shares.h"
#include "tessera/engine/star_actor.h"
#include "tessera/models/product_types.h"

namespace tessera::engine {
namespace {

// LibTorch's engine gives each device a thread for its backwards, which is
// shared by all ranks of a process and knows none. Collectives inside of a
// backward are this thread's.
class BackwardHere {
 public:
  BackwardHere() { state().set_multithreading_enabled(false); }
  ~BackwardHere() { state().set_multithreading_enabled(before_); }
  BackwardHere(const BackwardHere&) = delete;
  BackwardHere& operator=(const BackwardHere&) = delete;

 private:
  static c10::AutogradState& state() {
    return c10::AutogradState::get_tls_state();
  }
  const bool before_ = state().get_multithreading_enabled();
};

}  // namespace

StepInput step_input(const RunConfig& config, int64_t step, double lr,
                     const StepBatch& batch, const StepTargets& targets) {
  const SampleShares shares(config);
  const auto all = [global = config.batch.global, length = config.data.seq_len](
                       int64_t depth) { return global * (length - depth); };
  const auto read_of = [&](int64_t of) {
    return StepRead{.load =
                        [=](int64_t share, int64_t microbatch) {
                          const SampleRun samples =
                              shares.of(share, microbatch);
                          return batch(of, samples.first, samples.count);
                        },
                    .num_targets =
                        [=](int64_t depth) {
                          return targets ? targets(of, depth) : all(depth);
                        }};
  };
  StepInput input{.read = read_of(step),
                  .step = step,
                  .depths = config.model.mtp.layers,
                  .ahead_weight = config.model.mtp.weight};
  if (reads_for_others(config)) input.next = read_of(step + 1);
  const auto seed = static_cast<uint64_t>(config.run.seed);
  input.draw = [=](int64_t share, int64_t microbatch) {
    return nn::Draw{seed, step, shares.of(share, microbatch).first};
  };
  input.aux_scale = aux_mean(config);
  input.lr = lr;
  return input;
}

optim::LossScaleRule loss_scale_rule(parallel::PrecisionConfig precision) {
  precision.complete();
  return {.fixed = precision.loss_scale,
          .initial = precision.initial_loss_scale,
          .floor = precision.min_loss_scale,
          .growth_interval = precision.scale_growth_interval,
          .hysteresis = precision.scale_hysteresis,
          .consecutive_hysteresis = precision.consecutive_hysteresis,
          .words = {.who = "train",
                    .floor = "precision.min_loss_scale",
                    .way_out = "A smaller optimizer.lr, a longer "
                               "schedule.warmup, or precision.compute bf16 or "
                               "fp32 may help; the last checkpoint is whole."}};
}

RankModel::RankModel(const RunConfig& config, comm::Communicator& ranks,
                     program::Purpose use, program::passes::Choice passes)
    : config_(config), ranks_(ranks), use_(use), passes_(std::move(passes)) {
  const at::Device device(device_of_rank(config_, ranks_.rank()));
  if (trains() && StepGraph::is_for(config_, ranks_.world_size(), device)) {
    graph_ = std::make_unique<StepGraph>(device);
  }
  build_files();
  build_model();
  if (trains()) build_optimizer();
  release_files();
  build_actor();
  build_programs();
}

int64_t RankModel::samples_a_microbatch() const {
  return SampleShares(config_).rows_of(
      composed_.mesh.data_rank_of(composed_.coord));
}

void RankModel::step(StepInput input, const program::Observer& observer,
                     std::optional<StepInput> next) {
  run_step(std::move(input), observer, std::move(next));
  actor_->settle();
}

void RankModel::run_step(StepInput input, const program::Observer& observer,
                         std::optional<StepInput> next) {
  TORCH_INTERNAL_ASSERT(goes_on_ || !next, "this schedule flushes");
  input.samples = samples_a_microbatch();
  input.tokens = parallel::local_length(config_.data.seq_len, composed_.mesh);
  if (next) {
    next->samples = input.samples;
    next->tokens = input.tokens;
  }
  // The first two steps are taken at the first weights, whoever filled them.
  if (goes_on_ && optimizer_->steps() == 0 && !actor_->is_ahead()) {
    composed_.parameters->make_versions_alike();
  }
  const BackwardHere backward_here;
  program_ = &programs_.step.of(actor_->is_ahead(), next.has_value());
  const auto begin = [&] {
    actor_->begin_program(input, accumulation(config_),
                          program::Purpose::kTraining, next);
  };
  const auto run = [&] { program::execute(*program_, *actor_, observer); };
  begin();
  if (graph_) {
    graph_->take(*actor_, run, begin);
  } else {
    run();
  }
}

nn::LossSum RankModel::evaluate(
    const data::Batch& batch, const program::Observer& observer,
    const std::function<void(const at::Tensor&)>& on_logits) {
  StepInput input;
  input.on_logits = on_logits;
  input.read.load = [&](int64_t, int64_t) { return batch; };
  input.unpadded = batch.unpadded;
  input.samples = batch.inputs.size(0);
  input.tokens = parallel::local_length(batch.inputs.size(1), composed_.mesh);
  actor_->begin_program(std::move(input), 1, program::Purpose::kEvaluation);
  program::execute(programs_.evaluation, *actor_, observer);
  return actor_->losses();
}

void RankModel::build_files() {
  if (!config_.zero.offloads()) return;
  std::string folder = offload_folder(config_);
  std::error_code error;
  // No run's folder, as of 'tessera verify': among the temporary ones
  // where these are on a disk.
  if (config_.zero.offload_folder.empty() &&
      !std::filesystem::is_directory(folder, error)) {
    folder = temporary_files();
    if (lies_in_memory(folder)) folder = ".";
  }
  files_ = std::make_unique<FileMemory>(
      folder,
      "Free some, set zero.offload_folder to a folder on another disk, or "
      "zero.offload to none.");
}

// Structure, parallelism, memory; then the first weights.
void RankModel::build_model() {
  decoder_ = models::make_model(config_.model);
  mesh::DeviceMesh mesh;
  // Devices around device 0 are no ranks: their mesh has one.
  if (!config_.mesh.star()) {
    mesh = mesh_of(config_, ranks_.world_size());
  }
  rank_context().coords = mesh.describe(ranks_.rank());
  parallel::ComposeOptions options{
      .config = config_.strategies(),
      .seed = static_cast<uint64_t>(config_.run.seed),
      .trains = trains(),
      .micro_batches = batches_that_wait(config_),
      .device = device_of_rank(config_, ranks_.rank())};
  if (config_.zero.offloads_parameters()) {
    options.memory = [&](int64_t unit, at::IntArrayRef sizes,
                         at::ScalarType type) {
      return files_->zeros(part_in_files(program::Op::kFetchParameters, unit),
                           sizes, type);
    };
  }
  // Those of a checkpoint are read by whoever knows what is in it.
  if (config_.model.load_weights &&
      checkpoint::is_hugging_face_folder(config_.model.from)) {
    options.load = [&] {
      checkpoint::load_hugging_face(config_.model.from, *decoder_, mesh,
                                    mesh.coord_of(ranks_.rank()));
      if (!config_.model.lora.from.empty()) {
        checkpoint::load_peft(config_.model.lora.from, *decoder_, mesh,
                              mesh.coord_of(ranks_.rank()));
      }
    };
  }
  composed_ = parallel::compose(*decoder_, mesh, ranks_, options);
}

void RankModel::build_optimizer() {
  const MemoryScope scope(MemoryKind::kOptimizer);
  TORCH_INTERNAL_ASSERT(
      config_.whole_matrices ==
          (optim::update_rule(config_.optimizer.type).of_whole != nullptr),
      "the configuration was not completed for its optimizer");
  const auto matrices = parallel::hidden_matrices(composed_);
  std::vector<optim::FlatSegment> segments;
  for (const auto& parameter : composed_.parameters->trained()) {
    segments.push_back({.name = parameter.name,
                        .parameter = parameter.shard,
                        .gradient = parameter.gradient,
                        .decay = parameter.layout.global_shape().size() >= 2,
                        .is_matrix = matrices[segments.size()],
                        .sign_rate = parameter.balances_load
                                         ? config_.model.moe.bias_rate
                                         : 0});
  }
  optim::StateMemory memory;
  if (files_) {
    memory = [this](size_t i, at::IntArrayRef sizes, at::ScalarType type) {
      const int64_t unit = composed_.parameters->trained()[i].unit;
      return files_->zeros(part_in_files(program::Op::kFetchStates, unit),
                           sizes, type);
    };
  }
  optimizer_ =
      optim::make_optimizer(config_.optimizer, std::move(segments), memory);
}

void RankModel::build_actor() {
  const GradientRules rules{
      .scaling = {.clip_norm = config_.optimizer.clip_norm,
                  .normalizes = config_.optimizer.normalize_grad},
      .loss_scale = loss_scale_rule(config_.precision),
      .skips_nonfinite = config_.optimizer.skip_nonfinite,
      .guards_losses = !config_.run.is_on_cpu()};
  if (config_.mesh.star()) {
    actor_ = std::make_unique<StarActor>(
        replicas(), composed_, optimizer_.get(), ranks_.world(), rules);
  } else {
    actor_ = std::make_unique<RankActor>(*decoder_, composed_, optimizer_.get(),
                                         ranks_.world(), rules, files_.get(),
                                         shared_steps());
  }
}

std::unique_ptr<SharedSteps> RankModel::shared_steps() {
  if (!trains() || !reads_for_others(config_)) return nullptr;
  return std::make_unique<SharedSteps>(
      SharedSteps{.share = BatchShare(group_of_reader(composed_.mesh, ranks_)),
                  .extent = extent_of_step(config_, samples_a_microbatch())});
}

void RankModel::build_programs() {
  std::vector<program::Purpose> purposes = {program::Purpose::kEvaluation};
  if (trains()) purposes.push_back(program::Purpose::kTraining);
  programs_ = proved_programs(config_, composed_.mesh, composed_.model,
                              ranks_.rank(), purposes, passes_);
  goes_on_ = trains() && config_.pipeline.delayed() && !config_.mesh.star();
}

// The trained decoder and, for every further device, one of its shape.
std::vector<std::shared_ptr<models::Model>> RankModel::replicas() const {
  std::vector<std::shared_ptr<models::Model>> decoders = {decoder_};
  while (static_cast<int64_t>(decoders.size()) <
         data_parallel_degree(config_)) {
    decoders.push_back(models::make_model(config_.model));
    models::set_products(*decoders.back(), config_.precision.product_type());
    nn::materialise(
        *decoders.back(),
        {.dtype = config_.precision.compute_dtype(), .fill = false});
  }
  return decoders;
}

}  // namespace tessera::engine
