#include "tessera/train/trainer.h"

#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/files.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/models/decoder.h"
#include "tessera/optim/schedule.h"
#include "tessera/parallel/compose.h"
#include "tessera/program/checker.h"
#include "tessera/program/schedules/accumulation.h"
#include "tessera/train/data_setup.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/metrics.h"
#include "tessera/train/precision.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/state.h"
#include "tessera/train/train_stage.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Trainer {
 public:
  Trainer(const RunConfig& config, comm::Communicator& ranks,
          const TrainOptions& options)
      : config_(config), ranks_(ranks), options_(options), folder_(config) {}
  ~Trainer() { log::close_rank_file(static_cast<int>(ranks_.rank())); }

  ExitCode run() {
    open_folder();
    open_data();
    build_model();
    build_optimizer();
    resume();
    open_monitor();
    return loop_and_close();
  }

 private:
  bool leads() const { return ranks_.rank() == 0; }
  bool star() const { return config_.mesh.data_parallel == "dp"; }

  // The folder, this rank's log, the configuration as resolved.
  void open_folder() {
    if (leads()) {
      folder_.create();
      write_file_atomic(folder_.config(), to_json(config_));
    }
    ranks_.world().barrier();
    log::open_rank_file(static_cast<int>(ranks_.rank()),
                        folder_.log_of(ranks_.rank()));
  }

  // One rank prepares what the others then open; all compare what they see.
  void open_data() {
    if (leads()) prepare_data(config_, folder_);
    ranks_.world().barrier();
    data_ = open_datasets(config_, folder_);
    data::compare_across(ranks_.world(), data_.fingerprints);
  }

  // Structure, parallelism, memory; then the first weights.
  void build_model() {
    decoder_ = std::make_shared<models::Decoder>(config_.model);
    // Devices around device 0 are no ranks: their mesh has one.
    if (!star()) {
      mesh_ = config_.mesh.mesh(ranks_.world_size(), config_.zero.stage);
    }
    rank_context().coords = mesh_.describe(ranks_.rank());
    parallel::ComposeOptions options;
    options.materialise.seed = static_cast<uint64_t>(config_.run.seed);
    options.materialise.dtype = compute_dtype(config_);
    options.materialise.fill = !config_.model.load_weights;
    options.bucket_bytes =
        static_cast<int64_t>(config_.zero.bucket_mb * (1 << 20));
    composed_ = parallel::compose(*decoder_, mesh_, ranks_, options);
    if (config_.model.load_weights) {
      checkpoint::load_hugging_face(config_.model.from, *decoder_, mesh_,
                                    composed_.coord);
    }
  }

  void build_optimizer() {
    std::vector<optim::FlatSegment> segments;
    for (const auto& parameter : composed_.parameters) {
      const auto dims = parameter.spec->layout.global_shape().size();
      segments.push_back({.name = parameter.name,
                          .parameter = parameter.tensor,
                          .gradient = {},
                          .decay = dims >= 2});
    }
    optimizer_ = optim::make_optimizer(config_.optimizer, std::move(segments));
    const double clip_norm = config_.optimizer.clip_norm;
    if (star()) {
      stage_ = std::make_unique<StarStage>(replicas(), composed_, *optimizer_,
                                           clip_norm);
    } else {
      stage_ = std::make_unique<RankStage>(*decoder_, composed_, *optimizer_,
                                           clip_norm);
    }
    program_ =
        program::schedules::accumulation(accumulation(config_), clip_norm > 0);
    program::check(program_);
  }

  // The trained decoder and, for every further device, one of its shape.
  std::vector<std::shared_ptr<models::Decoder>> replicas() const {
    std::vector<std::shared_ptr<models::Decoder>> decoders = {decoder_};
    while (static_cast<int64_t>(decoders.size()) <
           data_parallel_degree(config_)) {
      decoders.push_back(std::make_shared<models::Decoder>(config_.model));
      nn::materialise(*decoders.back(),
                      {.dtype = compute_dtype(config_), .fill = false});
    }
    return decoders;
  }

  void resume() {
    checkpoint::State state = state_of(composed_, *optimizer_);
    const auto saved = train::resume(options_.resume, folder_.checkpoints(),
                                     state, ranks_.world());
    if (!saved) return;
    step_ = saved->step;
    saved_at_ = step_;
    log::info("resumed after step ", step_);
    if (saved->data != data_hash()) {
      log::warning(
          "the data is not what the checkpoint was trained on: other "
          "files, or another tokenizer. The run goes on with what "
          "data.train names now.");
    }
  }

  uint64_t data_hash() const {
    std::vector<uint64_t> hashes;
    for (const auto& file : data_.fingerprints) hashes.push_back(file.xxh3);
    return hash64(std::as_bytes(std::span(hashes)));
  }

  void open_monitor() {
    metrics_ = std::make_unique<Metrics>(config_, folder_, ranks_, step_);
  }

  // The sinks hear how the run ended, whatever ended it.
  ExitCode loop_and_close() {
    try {
      const ExitCode code = loop();
      metrics_->close(
          {.reason = code == ExitCode::kStopped ? "stopped" : "done",
           .exit_code = static_cast<int>(code)});
      return code;
    } catch (const std::exception& error) {
      tell_failure(error);
      throw;
    }
  }

  // A sink that fails as well (a full disk) must not hide the first cause.
  void tell_failure(const std::exception& error) {
    const auto* ours = dynamic_cast<const Error*>(&error);
    const ExitCode code = ours ? ours->exit_code() : ExitCode::kFailed;
    try {
      metrics_->close({.reason = "failed",
                       .exit_code = static_cast<int>(code),
                       .message = message_of(error)});
    } catch (const std::exception& second) {
      log::warning("the end of the run was not recorded: ", message_of(second));
    }
  }

  ExitCode loop() {
    if (step_ >= config_.run.steps) {
      log::info("nothing to do: ", step_, " steps are done, and run.steps is ",
                config_.run.steps);
    }
    while (step_ < config_.run.steps) {
      rank_context().step = step_ + 1;
      StepTotals totals = train_one_step();
      const bool last = step_ == config_.run.steps;
      const bool every = config_.checkpoint.every > 0;
      const bool due = every && step_ % config_.checkpoint.every == 0;
      if (due || last) totals.validation = validate();
      metrics_->record(step_, totals);
      if (due || (last && every) || totals.stop) save();
      if (totals.stop && !last) {
        log::info("stopped on request after step ", step_,
                  ", with a checkpoint; the same command goes on from there");
        return ExitCode::kStopped;
      }
    }
    return ExitCode::kOk;
  }

  StepTotals train_one_step() {
    const auto start = Clock::now();
    const int64_t num_microbatches = accumulation(config_);
    const double lr = optim::lr_at({step_, config_.run.steps},
                                   config_.optimizer.lr, config_.schedule);
    stage_->begin(step_input(num_microbatches, lr), num_microbatches);
    program::execute(program_, *stage_);
    ++step_;
    StepTotals totals = metrics_->exchange({.loss_sum = stage_->loss_sum(),
                                            .weight = stage_->weight(),
                                            .grad_norm = stage_->grad_norm(),
                                            .traffic = stage_->traffic(),
                                            .stop = options_.stop_requested()});
    totals.lr = lr;
    totals.seconds = seconds_since(start);
    return totals;
  }

  // A share takes a run of the step's samples, micro-batch by micro-batch.
  StepInput step_input(int64_t num_microbatches, double lr) const {
    const int64_t micro = config_.batch.micro;
    StepInput input;
    input.load = [this, micro, num_microbatches](int64_t share,
                                                 int64_t microbatch) {
      const int64_t first = (share * num_microbatches + microbatch) * micro;
      return data_.train->batch(step_, first, micro);
    };
    input.target_tokens =
        static_cast<double>(config_.batch.global * config_.data.seq_len);
    input.lr = lr;
    return input;
  }

  std::optional<monitor::Validation> validate() {
    if (!data_.valid) return std::nullopt;
    const auto start = Clock::now();
    const MeanLoss mean = mean_loss(*decoder_, *data_.valid,
                                    config_.batch.micro, *composed_.data);
    return monitor::Validation{.loss = mean.loss,
                               .tokens = mean.tokens,
                               .seconds = seconds_since(start)};
  }

  void save() {
    if (saved_at_ == step_) return;
    checkpoint::State state = state_of(composed_, *optimizer_);
    state.extra = to_json(SavedRun{
        .step = step_, .config = to_json(config_), .data = data_hash()});
    checkpoint::save(
        folder_.checkpoints(), step_, state, ranks_.world(),
        {.keep = config_.checkpoint.keep, .mesh = mesh_.describe()});
    saved_at_ = step_;
    log::info("checkpoint of step ", step_, " is in ", folder_.checkpoints());
  }

  const RunConfig& config_;
  comm::Communicator& ranks_;
  TrainOptions options_;
  RunFolder folder_;
  Datasets data_;
  std::shared_ptr<models::Decoder> decoder_;
  mesh::DeviceMesh mesh_;
  parallel::Composed composed_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<TrainStage> stage_;
  program::Program program_;
  std::unique_ptr<Metrics> metrics_;
  int64_t step_ = 0;       // updates done
  int64_t saved_at_ = -1;  // step of the last checkpoint
};

}  // namespace

ExitCode train(const RunConfig& config, comm::Communicator& ranks,
               const TrainOptions& options) {
  return Trainer(config, ranks, options).run();
}

}  // namespace tessera::train
