#include "tessera/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/local.h"
#include "tessera/checkpoint/local_place.h"
#include "tessera/comm/agree.h"
#include "tessera/comm/host_map.h"
#include "tessera/core/error.h"
#include "tessera/core/exit_code.h"
#include "tessera/core/files.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/engine/measured_speeds.h"
#include "tessera/engine/rank_model.h"
#include "tessera/engine/recorder.h"
#include "tessera/engine/run_devices.h"
#include "tessera/optim/schedule.h"
#include "tessera/program/instruction.h"
#include "tessera/train/begun_steps.h"
#include "tessera/train/changes.h"
#include "tessera/train/data_setup.h"
#include "tessera/train/memory_check.h"
#include "tessera/train/metrics.h"
#include "tessera/train/model_files.h"
#include "tessera/train/replicas.h"
#include "tessera/train/reruns.h"
#include "tessera/train/resumed_run.h"
#include "tessera/train/rewind.h"
#include "tessera/train/run_checkpoints.h"
#include "tessera/train/run_end.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/run_locks.h"
#include "tessera/train/run_validation.h"
#include "tessera/train/run_words.h"
#include "tessera/train/shared_folder.h"
#include "tessera/train/skipped_step.h"
#include "tessera/train/spike_watch.h"
#include "tessera/train/state.h"
#include "tessera/train/step_trace.h"
#include "tessera/train/text_samples.h"
#include "tessera/train/trained_model.h"

namespace tessera::train {

using engine::ModelActor;
using engine::RankModel;
using engine::RunConfig;

namespace {

// A device that had room for a step may have it again: who starts ranks anew
// does so then, and not where what was asked for never fitted.
[[noreturn]] void end_out_of_memory(const RunConfig& config,
                                    const c10::OutOfMemoryError& error,
                                    bool has_stepped) {
  refuse_out_of_memory(config, error, program::Purpose::kTraining,
                       has_stepped ? ExitCode::kFailed : ExitCode::kConfig);
}

class Trainer {
 public:
  // `so_far`: with options.resume, where a run has gone back to.
  // `speeds_are_measured`: those in the configuration, just now.
  Trainer(const RunConfig& config, comm::Communicator& ranks,
          const TrainOptions& options, const Rewind& so_far,
          bool speeds_are_measured)
      : config_(config),
        ranks_(ranks),
        options_(options),
        speeds_are_measured_(speeds_are_measured),
        folder_(config),
        checkpoints_(folder_.checkpoints(), ranks.world(),
                     config.checkpoint.async),
        so_far_(so_far),
        has_stepped_(so_far.num_rewinds > 0) {}
  ~Trainer() { log::close_rank_file(static_cast<int>(ranks_.rank())); }

  // Nothing where the run goes back to next().
  std::optional<ExitCode> run() {
    compare_across(ranks_.world(), to_json(config_));
    compare_devices(config_, ranks_.world());
    open_folder();
    open_data();
    model_ = std::make_unique<RankModel>(config_, ranks_);
    // Where the next step has begun, it throws at once.
    if (!model_->goes_on()) model_->actor().leave_nonfinite();
    validation_ = std::make_unique<RunValidation>(config_, ranks_, *model_,
                                                  data_.valid.get());
    if (leads()) tell_fp8_layers(config_, *model_);
    recorder_ =
        std::make_unique<engine::Recorder>(model_->composed(), ranks_.rank());
    resume();
    model_->release_files();
    keep_files();
    const bool is_done = step_ >= config_.run.steps;
    if (is_done) {
      log::info("nothing to do: ", step_, " steps are done, and run.steps is ",
                config_.run.steps);
    }
    if (is_done || validation_->is_out_of_patience()) {
      on_rank_0("writing summary.json", [&] {
        note_nothing_to_do(config_, ranks_.world_size(), step_);
      });
      return end_at_once();
    }
    if (checkpoints_.local() != nullptr && !is_from_local_) {
      checkpoints_.local()->begin_anew();
    }
    if (saves_anywhere()) go_on_from_resumed();
    open_monitor();
    return loop_and_close();
  }

  const std::optional<Rewind>& next() const { return next_; }
  // Some rank was asked to stop.
  bool stops() const { return stops_; }

 private:
  bool leads() const { return ranks_.rank() == 0; }

  // On a disk that may be slow; the others wait for it.
  void on_rank_0(const std::string& doing, const std::function<void()>& work) {
    comm::on_first(ranks_.world(), doing, work);
  }

  // What is saved next was trained on from there, whatever is newer.
  void go_on_from_resumed() {
    if (!is_resumed_) return;
    on_rank_0("going on from " + options_.resume,
              [&] { go_on_from(options_.resume, folder_.checkpoints()); });
  }

  // The folder and this rank's log.
  void open_folder() {
    if (leads()) {
      folder_.create();
      locks_.take_folder(folder_);
      if (saves_anywhere()) locks_.take_checkpoints(config_, folder_);
    }
    ranks_.world().barrier();
    if (saves_anywhere()) {
      require_shared(folder_.checkpoints(), ranks_.world());
    }
    open_local();
    log::open_rank_file(static_cast<int>(ranks_.rank()),
                        folder_.log_of(ranks_.rank()));
    if (ranks_.world_size() > 1) {
      log::info(ranks_.world_size(), " ranks, over ", ranks_.backend());
    }
    tell_devices(config_);
    tell_shares(config_, speeds_are_measured_);
    tell_left_out(config_);
    if (leads()) tell_adapters(config_);
  }

  void open_local() {
    if (!config_.checkpoint.saves_locally()) return;
    comm::Group& world = ranks_.world();
    checkpoints_.set_local(std::make_unique<checkpoint::LocalCheckpoints>(
        folder_.local(), world, comm::hosts_of(world)));
  }

  // What was done may be in the memory of hosts alone.
  ExitCode end_at_once() {
    if (checkpoints_.local() == nullptr || !config_.checkpoint.saves()) {
      return ExitCode::kOk;
    }
    if (is_from_local_) {
      checkpoints_.save_last(step_, [this] { return content(); });
    }
    // Also what a start left that was killed once its last checkpoint stood.
    const auto is_newer = comm::numbers_of_rank_0(
        ranks_.world(),
        {!is_from_local_ &&
         !checkpoint::newest_local_checkpoint(folder_.local()).empty()});
    if (options_.resume == "auto" && is_newer[0] == 0) {
      checkpoints_.local()->remove();
    }
    return ExitCode::kOk;
  }

  // One rank prepares what the others then open.
  void open_data() {
    if (!options_.is_prepared) {
      comm::on_all(ranks_.world(), "preparing the data", [&] {
        if (leads()) prepare_data(config_, folder_, options_.resume);
      });
    }
    data_ = open_datasets(config_, folder_, options_.resume, ranks_.world());
  }

  void tell_unused_memory() const {
    if (config_.checkpoint.saves_locally() || options_.resume != "auto") return;
    const std::string newest =
        checkpoint::newest_local_checkpoint(folder_.local());
    if (newest.empty()) return;
    log::warning(newest, " is newer than all in ", folder_.checkpoints(),
                 ", and not used: checkpoint.local_every is 0. To go on from "
                 "it stop this run before its first checkpoint, and set "
                 "checkpoint.local_every again.");
  }

  void resume() {
    checkpoint::State state = state_of(model_->composed(), model_->optimizer());
    const auto found =
        train::resume(options_.resume, folder_.checkpoints(),
                      checkpoints_.local(), state, ranks_.world());
    if (leads()) tell_unused_memory();
    if (found) {
      add_rewinds(so_far_, *found, folder_, config_.batch.global,
                  ranks_.world());
    }
    data_.train->leave_out(so_far_.left_out);
    if (!found) return load_first_weights(config_, *model_, ranks_.world());
    const SavedRun* const saved = &found->run;
    step_ = saved->step;
    spikes_ = SpikeWatch(config_.spike, saved->losses);
    data_.train->go_on(step_, saved->samples);
    tokens_before_ = saved->tokens - tokens_of(step_);
    is_resumed_ = true;
    is_from_local_ = found->is_local;
    if (!is_from_local_) checkpoints_.found(step_);
    validation_->go_on(saved->best);
    skipped_ = saved->skipped;
    if (saved->loss_scale)
      model_->actor().loss_scale().go_on(*saved->loss_scale);
    log::info("resumed after step ", step_,
              is_from_local_ ? ", from the memory of hosts" : "");
    refuse_another_line(
        *saved, config_, options_.resume,
        options_.resume == "auto" ? folder_.checkpoints() : options_.resume);
    refuse_skipping_what_was_taken(saved->config, to_json(config_), step_,
                                   saved->samples, so_far_.left_out);
    if (saved->best && validated_otherwise(saved->config, to_json(config_))) {
      log::info("validation is another one now: the lowest loss so far, ",
                saved->best->loss, " after step ", saved->best->step,
                ", does not count");
      validation_->go_on(std::nullopt);
    }
    if (leads()) warn_of_changes(*saved, config_, data_hash(), caches_hash());
  }

  // What was refused until here has left the one before as it was.
  void keep_files() {
    on_rank_0("writing " + folder_.config(), [&] {
      write_file_atomic(folder_.config(), to_json(config_));
      keep_model_files(config_, folder_, is_resumed_);
      keep_tokenizer(config_, data_.tokenizer, folder_);
    });
    // Hosts may have run folders of their own, and one checkpoint.dir.
    if (!leads()) keep_tokenizer(config_, data_.tokenizer, folder_);
  }

  static uint64_t hash_of(const std::vector<data::FileFingerprint>& files) {
    std::vector<uint64_t> hashes;
    for (const auto& file : files) hashes.push_back(file.xxh3);
    return hash64(std::as_bytes(std::span(hashes)));
  }
  uint64_t data_hash() const { return hash_of(data_.fingerprints); }
  uint64_t caches_hash() const {
    return data_.caches.empty() ? 0 : hash_of(data_.caches);
  }

  void open_monitor() {
    first_step_ = step_;
    if (config_.monitor.sample > 0) {
      samples_ = std::make_unique<TextSamples>(config_, data_, ranks_.world());
    }
    // Rank 0 measures what the machine can do while no other rank computes, and
    // in the first step nobody should wait for what it opens.
    ranks_.world().barrier();
    metrics_ = std::make_unique<Metrics>(
        config_, folder_, ranks_, model_->mesh(), step_, steps_per_epoch(),
        tokens_before_, best_loss());
    replicas_ =
        std::make_unique<ReplicaWatch>(config_.monitor.replicas, ranks_.world(),
                                       model_->composed().activations.device());
    compare_replicas();  // what ranks begin with
    reruns_ = std::make_unique<Reruns>(config_.monitor.reruns, config_, *model_,
                                       ranks_.world());
    begun_ =
        std::make_unique<BegunSteps>(config_, *model_, *recorder_, *metrics_,
                                     checkpoints_, options_.stop_requested);
    ranks_.world().barrier();
  }

  std::optional<double> best_loss() const {
    const auto& best = validation_->best();
    return best ? std::optional(best->loss) : std::nullopt;
  }

  // Of all steps, were they of today's batch.
  int64_t tokens_of(int64_t steps) const {
    return steps * config_.batch.global * config_.data.seq_len;
  }

  // 0: weighted sources have epochs of their own.
  double steps_per_epoch() const {
    if (!config_.data.weights.empty()) return 0;
    return static_cast<double>(data_.train->sampler().num_samples()) /
           static_cast<double>(config_.batch.global);
  }

  // The sinks hear how the run ended, whatever ended it.
  std::optional<ExitCode> loop_and_close() {
    try {
      const std::optional<ExitCode> code = loop_in_memory();
      if (!code) {
        on_rank_0("writing metrics", [&] {
          metrics_->close({.reason = "rewound", .rewinds = next_->num_rewinds});
        });
        return std::nullopt;
      }
      if (checkpoints_.local() != nullptr) checkpoints_.local()->remove();
      trace_.finish();
      metrics_->close(
          {.reason = code == ExitCode::kStopped ? "stopped" : "done",
           .exit_code = static_cast<int>(*code),
           .rewinds = so_far_.num_rewinds});
      return code;
    } catch (const std::exception& error) {
      tell_failure(error);
      throw;
    }
  }

  std::optional<ExitCode> loop_in_memory() {
    try {
      return loop();
    } catch (const c10::OutOfMemoryError& error) {
      end_out_of_memory(config_, error, has_stepped_);
    }
  }

  // A sink that fails as well (a full disk) must not hide the first cause.
  void tell_failure(const std::exception& error) {
    log::note("ended with an error: " + message_of(error));
    try {
      metrics_->close({.reason = "failed",
                       .exit_code = static_cast<int>(exit_code_of(error)),
                       .message = message_of(error),
                       .rewinds = so_far_.num_rewinds});
    } catch (const std::exception& second) {
      log::warning("the end of the run was not recorded: ", message_of(second));
    }
  }

  std::optional<ExitCode> loop() {
    if (step_ == 0 && validation_->is_due_at_start()) {
      metrics_->validated_at_start(validation_->validate());
    }
    while (step_ < config_.run.steps) {
      begin_step();
      std::optional<StepTotals> done = finish_steps();
      if (next_) return std::nullopt;
      if (!done) continue;
      StepTotals& totals = *done;
      const bool last = step_ == config_.run.steps;
      const bool due = saves_at(step_);
      if (validation_->is_due(step_, due)) {
        totals.record.validation = validation_->validate_after(step_);
      }
      const bool ends = last || validation_->is_out_of_patience();
      if (samples_ && (ends || step_ % config_.monitor.sample == 0)) {
        totals.record.sample = samples_->write(*model_, ranks_, step_);
        model_->release_files();
      }
      record(std::move(totals.record));
      if (replicas_->is_due(step_)) compare_replicas();
      // A batch that has begun is done first.
      const bool stops = stops_ && !model_->actor().is_ahead();
      const bool saves = ends && config_.checkpoint.saves();
      if (saves || stops) {
        save_last();
      } else {
        if (due || validation_->is_best(step_)) save_due();
        if (saves_locally_at(step_) && !checkpoints_.stands(step_)) {
          save_local();
        }
      }
      if (stops && !ends) {
        log::info("stopped on request after step ", step_,
                  ", with a checkpoint; the same command goes on from there");
        return ExitCode::kStopped;
      }
      if (ends) break;
    }
    return ExitCode::kOk;
  }

  bool saves_at(int64_t step) const {
    const int64_t every = config_.checkpoint.every;
    return every > 0 && step % every == 0;
  }

  bool saves_locally_at(int64_t step) const {
    const int64_t every = config_.checkpoint.local_every;
    return every > 0 && step % every == 0;
  }

  bool saves_anywhere() const {
    return config_.checkpoint.saves() || config_.checkpoint.saves_locally();
  }

  // Behind this step someone looks at the model, or the run ends.
  bool is_looked_at(int64_t step) const {
    const bool samples = samples_ && step % config_.monitor.sample == 0;
    return stops_ || step == config_.run.steps || samples || saves_at(step) ||
           saves_locally_at(step) ||
           validation_->is_due(step, saves_at(step)) ||
           replicas_->is_due(step) || reruns_->is_due(step + 1);
  }

  // The next step may begin in this one.
  bool goes_on_behind(int64_t step) const {
    return model_->goes_on() && !is_looked_at(step);
  }

  void begin_step() {
    const int64_t step = step_ + 1;
    rank_context().step = step;
    if (reruns_->is_due(step)) reruns_->check(step, input_of_step(step_, 0));
    // A step that updates nothing does not move the schedule on.
    const double lr = optim::lr_at({step_ - skipped_, config_.run.steps},
                                   config_.optimizer.lr, config_.schedule);
    std::optional<engine::StepInput> next;
    if (goes_on_behind(step)) next = input_of_step(step, /*lr=*/0);
    begun_->begin({step, lr}, input_of_step(step_, lr), std::move(next));
    step_ = step;
  }

  // Tells of steps that may be late no longer; gives back the newest one's
  // totals, untold, once none is left. Nothing where the run goes back, too.
  std::optional<StepTotals> finish_steps() {
    while (is_looked_at(step_) ||
           begun_->count() > config_.monitor.losses_late) {
      BegunSteps::Finished done = begun_->finish();
      has_stepped_ = true;
      if (model_->actor().was_skipped()) {
        handle_skipped(done.step);
      } else {
        standstill_.updated();
      }
      stops_ |= done.totals.stop;
      watch_loss(done.totals.record);
      if (next_) return std::nullopt;
      trace_.add(done.step - first_step_, model_->mesh(), done.spans);
      if (!done.totals.is_saving) checkpoints_.finish();
      if (begun_->count() == 0) return std::move(done.totals);
      record(std::move(done.totals.record));
    }
    return std::nullopt;
  }

  void record(monitor::StepRecord record) {
    record.checkpoint_failed = checkpoints_.take_failed();
    metrics_->record(std::move(record));
  }

  engine::StepInput input_of_step(int64_t of, double lr) {
    engine::StepInput input = step_input(
        config_, of, lr,
        [this](int64_t step, int64_t first, int64_t count) {
          data_.train->will_need(step + 1, first, count);
          return data_.train->batch(step, first, count);
        },
        [this](int64_t step, int64_t depth) {
          return data_.train->num_targets(step, depth);
        });
    if (of + 1 == config_.run.steps) input.next.reset();
    return input;
  }

  void handle_skipped(int64_t step) {
    ModelActor& actor = model_->actor();
    const auto name = [&] {
      name_nonfinite(config_, *model_, *data_.train, ranks_.world(), step - 1,
                     input_of_step(step - 1, 0));
    };
    if (!actor.may_skip()) {
      const double norm = actor.grad_norm();
      // Steps behind it have changed the weights with which it was.
      if (begun_->count() == 0) name();
      if (config_.spike.rewinds()) {
        if (leads()) {
          log::warning("step ", step, ": the gradient's norm is ", norm);
        }
        return go_back(step);
      }
      engine::require_finite(norm);
    }
    ++skipped_;
    if (leads()) tell_of_skipped_step(actor, step, skipped_);
    // While a scale is being found, gradients overflow now and then.
    if (config_.optimizer.skip_nonfinite) name();
    require_progress(step);
  }

  void watch_loss(const monitor::StepRecord& record) {
    if (next_) return;
    const auto spike = spikes_.add(record.loss);
    if (!spike) return;
    const bool rewinds = config_.spike.rewinds();
    if (leads() && (spike->is_first || rewinds)) {
      log::warning("loss spike at step ", record.step, ": ", record.loss, ", ",
                   std::llround(spike->deviations), " deviations above ",
                   spike->median, ", the median of the ", config_.spike.window,
                   " losses before");
    }
    if (rewinds) go_back(record.step);
  }

  void go_back(int64_t step) {
    checkpoints_.finish();
    const auto& sampler = data_.train->sampler();
    next_ = find_rewind(config_, folder_, sampler,
                        {.step = step,
                         .has_saved = checkpoints_.has_saved(),
                         .first_samples = sampler.taken_before(first_step_),
                         .so_far = so_far_},
                        ranks_.world());
  }

  // A scale that is found while training moves, or ends the run by itself.
  void require_progress(int64_t step) {
    ModelActor& actor = model_->actor();
    standstill_.skipped(actor.loss_scale().value() != actor.scale());
    TS_CHECK(!standstill_.is_too_long(), "step ", step, " is the ",
             standstill_.in_a_row(),
             "th in a row that updated nothing, its gradient's norm ",
             actor.grad_norm(),
             ": what would train on is lost. Go on from an earlier checkpoint "
             "(--resume PATH) with a lower optimizer.lr, or another "
             "precision.loss_scale; optimizer.skip_nonfinite names who made "
             "it.");
  }

  std::optional<optim::LossScaleState> loss_scale_state() {
    const optim::LossScale& scale = model_->actor().loss_scale();
    if (!scale.scales()) return std::nullopt;
    return scale.state();
  }

  RunCheckpoints::Content content() {
    checkpoint::State state = state_of(model_->composed(), model_->optimizer());
    state.extra =
        to_json(SavedRun{.step = step_,
                         .samples = data_.train->sampler().taken_before(step_),
                         .tokens = tokens_before_ + tokens_of(step_),
                         .config = to_json(config_),
                         .data = data_hash(),
                         .caches = caches_hash(),
                         .best = validation_->best(),
                         .skipped = skipped_,
                         .loss_scale = loss_scale_state(),
                         .losses = spikes_.losses(),
                         .num_rewinds = so_far_.num_rewinds,
                         .left_out = so_far_.left_out,
                         .line_base = so_far_.line_base});
    checkpoint::SaveOptions options{.keep = config_.checkpoint.keep,
                                    .mesh = model_->mesh().describe()};
    const auto& best = validation_->best();
    if (config_.checkpoint.keep_best && best) options.best = best->step;
    return {.state = std::move(state), .options = std::move(options)};
  }

  void compare_replicas() {
    const auto take = [this] {
      return state_of(model_->composed(), model_->optimizer());
    };
    if (replicas_->compare(step_, take, model_->mesh())) {
      model_->release_files();
    }
  }

  void sync_metrics() {
    on_rank_0("writing metrics", [&] { metrics_->sync(); });
  }

  // Of ranks that were out of step nothing is kept.
  void before_save() {
    comm::compare_calls(ranks_);
    compare_replicas();
    sync_metrics();
  }

  void save_due() {
    before_save();
    checkpoints_.save_due(step_, [this] { return content(); });
    model_->release_files();
  }

  void save_local() {
    before_save();
    checkpoints_.save_local(step_, [this] { return content(); });
    model_->release_files();
  }

  void save_last() {
    before_save();
    if (!saves_anywhere()) {  // a run that is stopped
      if (leads()) locks_.take_checkpoints(config_, folder_);
      require_shared(folder_.checkpoints(), ranks_.world());
      go_on_from_resumed();
    }
    checkpoints_.save_last(step_, [this] { return content(); });
    model_->release_files();
  }

  const RunConfig& config_;
  comm::Communicator& ranks_;
  TrainOptions options_;
  const bool speeds_are_measured_;
  RunFolder folder_;
  RunLocks locks_;
  RunCheckpoints checkpoints_;
  Datasets data_;
  std::unique_ptr<RankModel> model_;
  std::unique_ptr<RunValidation> validation_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<TextSamples> samples_;  // where they are asked for
  std::unique_ptr<engine::Recorder> recorder_;
  std::unique_ptr<ReplicaWatch> replicas_;
  std::unique_ptr<Reruns> reruns_;
  std::unique_ptr<BegunSteps> begun_;
  StepTrace trace_{config_, folder_, ranks_};
  SpikeWatch spikes_{config_.spike, {}};
  Rewind so_far_;               // before this start
  std::optional<Rewind> next_;  // where the run goes back to
  bool has_stepped_ = false;    // in this process
  int64_t first_step_ = 0;      // updates done before this run
  int64_t tokens_before_ = 0;  // beyond tokens_of(), by another batch or length
  int64_t step_ = 0;           // steps done, or begun
  int64_t skipped_ = 0;        // that updated nothing
  optim::Standstill standstill_{config_.precision.scale_hysteresis};
  bool is_resumed_ = false;     // from a checkpoint
  bool is_from_local_ = false;  // in the memory of hosts
  bool stops_ = false;          // some rank was asked to stop
};

// Alike on all ranks, which then cut the model by it. Who starts from the
// run's config.json gets these speeds, and does not measure again.
RunConfig with_measured_speeds(const RunConfig& of, comm::Communicator& ranks) {
  RunConfig config = of;
  config.mesh.speeds = engine::measured_speeds(
      ranks, at::Device(engine::device_of_rank(config, ranks.rank())));
  config.mesh.measure_speeds = false;
  config.run.device = config.run.device_text();  // whose speeds these are
  complete(config, ranks.world_size());
  return config;
}

// As often as it goes back from a spike.
ExitCode train_through_spikes(const RunConfig& config,
                              comm::Communicator& ranks, TrainOptions options,
                              bool speeds_are_measured) {
  Rewind so_far{.resume = options.resume};
  try {
    while (true) {
      Trainer trainer(config, ranks, options, so_far, speeds_are_measured);
      const auto code = trainer.run();
      if (code) return *code;
      so_far = *trainer.next();
      options.resume = so_far.resume;
      options.is_prepared = true;
      if (trainer.stops()) options.stop_requested = [] { return true; };
    }
  } catch (const c10::OutOfMemoryError& error) {
    end_out_of_memory(config, error, so_far.num_rewinds > 0);
  }
}

}  // namespace

ExitCode train(const RunConfig& config, comm::Communicator& ranks,
               const TrainOptions& options) {
  try {
    if (!config.mesh.measure_speeds) {
      return train_through_spikes(config, ranks, options, false);
    }
    compare_across(ranks.world(), to_json(config));
    const RunConfig measured = with_measured_speeds(config, ranks);
    return train_through_spikes(measured, ranks, options, true);
  } catch (const c10::OutOfMemoryError& error) {
    refuse_out_of_memory(config, error);
  }
}

}  // namespace tessera::train
