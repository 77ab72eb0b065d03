// tessera train: from a configuration file to a trained model.
#include <filesystem>
#include <iostream>
#include <optional>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/overrides.h"
#include "cli/ranks.h"
#include "tessera/checkpoint/local_place.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/config_places.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/core/screen.h"
#include "tessera/engine/bubble_hint.h"
#include "tessera/engine/cut_text.h"
#include "tessera/engine/deepspeed.h"
#include "tessera/engine/idle_keys.h"
#include "tessera/engine/run_config.h"
#include "tessera/engine/run_devices.h"
#include "tessera/launch/signals.h"
#include "tessera/launch/store.h"
#include "tessera/train/preflight.h"
#include "tessera/train/resumed_run.h"
#include "tessera/train/run_end.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/trained_model.h"
#include "tessera/train/trainer.h"

namespace tessera::cli {
namespace {

struct TrainFlags {
  std::string file;
  std::vector<std::string> sets;
  std::string deepspeed;  // "": none
  RankFlags ranks;
  std::string resume = "auto";
  int64_t max_restarts = 0;
  int64_t min_nproc = 0;  // 0: as many as at the start
  bool dry_run = false;
  bool print_config = false;
};

// What only a new checkpoint changes, wherever it is.
class Progress {
 public:
  Progress(const engine::RunConfig& config, const std::string& resume)
      : place_(train::RunFolder(config).local()),
        saves_locally_(config.checkpoint.saves_locally()) {
    // A run that goes on from elsewhere leaves those that are there.
    if (resume != "auto") left_ = newest_local();
  }

  std::string operator()() const {
    const std::string local = newest_local();
    return c10::str(checkpoint::newest_commit(place_.checkpoints), " ",
                    local == left_ ? "" : local);
  }

 private:
  std::string newest_local() const {
    return saves_locally_ ? checkpoint::newest_local_checkpoint(place_) : "";
  }

  checkpoint::LocalPlace place_;
  bool saves_locally_;
  std::string left_;
};

class TrainCommand {
 public:
  TrainCommand(TrainFlags flags, const std::vector<std::string>& extras)
      : flags_(std::move(flags)) {
    config_ = engine::read_run_config(
        flags_.file, overrides_of(flags_.sets, extras), &origins_);
    if (!flags_.deepspeed.empty()) {
      deepspeed_.emplace(flags_.deepspeed);
      deepspeed_->apply(config_, origins_);
    }
    train::read_model_source(config_, origins_);
  }

  void run(int argc, char** argv) {
    try {
      run_command(argc, argv);
    } catch (const launch::PeerRefused&) {
      throw;
    } catch (const Error& error) {
      if (error.exit_code() != ExitCode::kConfig) throw;
      throw Error(ExitCode::kConfig,
                  config::with_places(message_of(error), origins_));
    }
  }

 private:
  void run_command(int argc, char** argv) {
    const auto place = find_place(flags_.ranks);
    flags_.resume =
        train::checkpoint_of(flags_.resume, train::RunFolder(config_));
    std::vector<std::string> arguments(argv, argv + argc);
    replace_flag(arguments, "--resume", flags_.resume);
    const int64_t nproc = flags_.ranks.nproc;
    TS_CHECK_USAGE(!config_.mesh.star() || nproc <= 1 ||
                       nproc == engine::implied_world_size(config_),
                   "--nproc ", nproc,
                   " with mesh.data_parallel dp, "
                   "whose devices are threads of one process. Set mesh.dp to "
                   "their number, and leave --nproc out or give the same.");
    check_restarts(place);
    const int64_t world_size =
        place.source == "none" ? wanted_world() : place.world_size;
    asked_ = config_;
    asked_origins_ = origins_;
    complete(
        config_, origins_,
        config_.mesh.star() ? engine::implied_world_size(config_) : world_size);
    check_fewer(place, world_size);
    if (show_only()) return;
    // The ranks that this program starts have heard of it from their launcher.
    if (place.source != "tessera" && place.rank == 0) {
      tell_of_keys();
      warn_of_moved_run();
    }
    std::optional<launch::StopRequest> stop;
    const RankJob job{
        .comm = config_.comm,
        .devices = engine::devices_of_ranks(config_, world_size),
        .threads = config_.run.threads,
        .record_folder = train::RunFolder(config_).logs(),
        .prepare =
            [this](const launch::RankEnvironment& first) {
              train::preflight(
                  config_,
                  {.first = first.rank, .count = first.local_world_size},
                  flags_.resume);
            },
        .on_start = [&stop] { stop.emplace(); },
        .work =
            [&](comm::Communicator& ranks) {
              return static_cast<int>(train::train(
                  config_, ranks,
                  {.is_prepared = true,
                   .resume = flags_.resume,
                   .stop_requested = [&] { return stop->requested(); }}));
            },
        .arguments = arguments,
        .restarts = restarts(arguments)};
    const auto started = std::filesystem::file_time_type::clock::now();
    num_ranks_ = world_size;
    const auto tell = [&](int code, const std::string& message) {
      if (place.source != "none") return;
      train::note_end(
          config_, num_ranks_,
          {.exit_code = code, .message = message, .started = started});
      tell_what_stays(code);
    };
    try {
      const int code = run_ranks(job, flags_.ranks, place, world_size);
      set_exit_code(code);
      tell(code, "the ranks were ended; the ends of logs/ say what they saw");
    } catch (const Error& error) {
      tell(static_cast<int>(error.exit_code()), message_of(error));
      throw;
    }
  }

  // In the memory of this host: a run that has ended well leaves nothing. One
  // that was refused left nothing either: what is there is of an earlier start,
  // or of a run that goes on.
  void tell_what_stays(int code) const {
    const bool was_refused = code == static_cast<int>(ExitCode::kConfig) ||
                             code == static_cast<int>(ExitCode::kUsage);
    if (was_refused || !config_.checkpoint.saves_locally()) return;
    const checkpoint::LocalPlace local = train::RunFolder(config_).local();
    const std::string folder = checkpoint::local_checkpoint_folder(local);
    if (folder.empty()) return;
    const std::string newest = checkpoint::newest_local_checkpoint(local);
    if (checkpoint::is_used(folder)) return;
    show_on_screen(c10::str(
        "tessera: ", newest.empty() ? folder : newest, " stays in memory: ",
        newest.empty() ? "the next run removes it"
        : flags_.resume == "auto"
            ? "the same command goes on from it"
            : "the same command with --resume auto goes on from it",
        ", 'rm -r ", folder, "' gives the memory back\n"));
  }

  void check_restarts(const launch::RankEnvironment& place) const {
    const bool restarts = flags_.max_restarts > 0;
    if ((!restarts && flags_.min_nproc == 0) || place.source == "tessera") {
      return;
    }
    const char* const flag = restarts ? "--max-restarts" : "--min-nproc";
    TS_CHECK_USAGE(place.source == "none", flag, " is of ranks that ",
                   "tessera train starts, but ", place.source,
                   " has started these. Have it start them again, or leave ",
                   flag, " out.");
    TS_CHECK_USAGE(!config_.mesh.star(), flag,
                   " is of processes that are started again, but with "
                   "mesh.data_parallel dp ranks are threads of one. Use "
                   "mesh.data_parallel ddp, or leave it out.");
    TS_CHECK_USAGE(flags_.ranks.ranks == "processes", flag,
                   " starts processes again, but these ranks are threads of "
                   "one. Use --ranks processes.");
    TS_CHECK_USAGE(restarts, "--min-nproc ", flags_.min_nproc,
                   " is of ranks that are started again. Give --max-restarts "
                   "too, or leave it out.");
  }

  Restarts restarts(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--resume", "auto"});
    return {.most = flags_.max_restarts,
            .progress = Progress(config_, flags_.resume),
            .fewer =
                [this](int64_t ranks, bool progressed) {
                  const int64_t fewer =
                      fewer_than(ranks, progressed ? "auto" : flags_.resume);
                  if (fewer > 0) num_ranks_ = fewer;
                  return fewer;
                },
            .arguments = std::move(arguments)};
  }

  // The most ranks below `ranks` that can go on here; 0: --min-nproc has none.
  int64_t fewer_than(int64_t ranks, const std::string& resume) {
    while (flags_.min_nproc > 0 && --ranks >= flags_.min_nproc) {
      const auto why = why_not_on(ranks, [&](const auto& config) {
        train::preflight(config, {.count = ranks}, resume);
      });
      if (why.empty()) return ranks;
      log::warning("not on ", ranks, " ranks: ", why);
    }
    return 0;
  }

  // Why so many ranks cannot train this, or what else `check` complains of; "":
  // they can.
  std::string why_not_on(
      int64_t ranks,
      const std::function<void(const engine::RunConfig&)>& check) {
    engine::RunConfig config = asked_;
    config::Provenance origins = asked_origins_;
    try {
      complete(config, origins, ranks);
      TS_CHECK_CONFIG(config.batch.global == config_.batch.global,
                      "batch.global would be ", config.batch.global,
                      " in place of ", config_.batch.global,
                      ", and the steps others. Set it, or DeepSpeed's "
                      "train_batch_size.");
      check(config);
    } catch (const Error& error) {
      if (error.exit_code() != ExitCode::kConfig) throw;
      return message_of(error);
    }
    return "";
  }

  // That --min-nproc can be kept to.
  void check_fewer(const launch::RankEnvironment& place, int64_t world_size) {
    if (flags_.min_nproc == 0 || place.source == "tessera") return;
    TS_CHECK_USAGE(flags_.min_nproc < world_size, "--min-nproc ",
                   flags_.min_nproc, " is no fewer than the ", world_size,
                   " ranks of the run. Give fewer, or a larger --nproc.");
    std::string nearest;
    for (int64_t ranks = world_size - 1; ranks >= flags_.min_nproc; --ranks) {
      const std::string why = why_not_on(ranks, [](const auto&) {});
      if (why.empty()) return;
      if (nearest.empty()) nearest = why;
    }
    TS_CHECK_CONFIG(false, "--min-nproc ", flags_.min_nproc,
                    ": no fewer ranks than ", world_size,
                    " can train this; mesh.dp, dp_replicate and dp_shard that "
                    "are left out follow their number. With ",
                    world_size - 1, ": ", nearest);
  }

  int64_t wanted_world() const {
    if (config_.mesh.star()) return 1;
    return flags_.ranks.nproc > 0 ? flags_.ranks.nproc
                                  : engine::implied_world_size(config_);
  }

  void complete(engine::RunConfig& config, config::Provenance& origins,
                int64_t world_size) {
    if (deepspeed_) deepspeed_->apply_batch(config, world_size, origins);
    engine::complete(config, world_size);
  }

  bool show_only() const {
    if (flags_.print_config) {
      engine::RunConfig copy = config_;
      config::Section root;
      copy.declare(root);
      config::Provenance origins = origins_;
      if (config_.pipeline.is_split_chosen) {
        origins["pipeline.split"] = "chosen " + engine::cut_text(config_);
      }
      std::cout << config::print(root, origins);
    }
    if (flags_.dry_run) {
      tell_of_keys();
      train::check_paths(config_);
      std::cout << train::describe_plan(config_);
      warn_of_this_host();
    }
    return flags_.print_config || flags_.dry_run;
  }

  // Of this host, which may not be the one that the plan is for.
  void warn_of_this_host() const {
    const int64_t ranks =
        config_.mesh.star() ? 1 : engine::implied_world_size(config_);
    try {
      config_.comm.check_gpus(engine::devices_of_ranks(config_, ranks),
                              num_gpus());
      train::check_memory(config_, {.count = ranks}, train::memory_of_host());
    } catch (const Error& error) {
      log::warning("on this host alone: ", message_of(error));
    }
  }

  // The configuration that a run kept says where that was.
  void warn_of_moved_run() const {
    namespace fs = std::filesystem;
    const fs::path file = fs::absolute(flags_.file), here = file.parent_path();
    const fs::path goes = train::RunFolder(config_).path();
    const auto is_chosen = [&](const char* key) {
      const auto origin = origins_.find(key);
      return origin != origins_.end() && origin->second.starts_with("--");
    };
    std::error_code none;
    if (file.filename() != "config.json" || is_chosen("run.name") ||
        is_chosen("run.dir") || fs::equivalent(here, goes, none) ||
        !checkpoint::has_checkpoints((here / "checkpoints").string())) {
      return;
    }
    log::warning(flags_.file, " is of the run in ", here.string(),
                 ", but run.dir and run.name in it lead to ", goes.string(),
                 ": the checkpoints beside it are not gone on from. Give "
                 "--run.dir=",
                 here.parent_path().string(),
                 " --run.name=", here.filename().string(), " to go on there.");
  }

  // Those without effect, what is meant where DeepSpeed's are left out, and
  // too few micro-batches.
  void tell_of_keys() const {
    if (deepspeed_) {
      for (const auto& open : deepspeed_->left_open(config_)) log::info(open);
      const auto idle = deepspeed_->without_effect();
      if (!idle.empty()) log::warning(idle);
    }
    for (const auto& idle : engine::without_effect(config_, origins_)) {
      log::warning(idle);
    }
    const auto hint = engine::bubble_hint(config_);
    if (!hint.empty()) log::warning(hint);
  }

  TrainFlags flags_;
  engine::RunConfig config_;
  config::Provenance origins_;
  // What hangs on the number of ranks is open in these.
  engine::RunConfig asked_;
  config::Provenance asked_origins_;
  int64_t num_ranks_ = 0;  // that were started last
  std::optional<engine::DeepSpeed> deepspeed_;
};

}  // namespace

void add_train(CLI::App& program, int argc, char** argv) {
  CLI::App* command = program.add_subcommand("train", "Train a model");
  auto flags = std::make_shared<TrainFlags>();
  command->add_option("RUN.json", flags->file, "the configuration")->required();
  add_sets(*command, flags->sets);
  command->add_option(
      "--deepspeed", flags->deepspeed,
      "DeepSpeed's JSON, as it is, for what the run's leaves out");
  add_rank_flags(*command, flags->ranks);
  command
      ->add_option("--resume", flags->resume,
                   "auto, never, a checkpoint folder, or a run's")
      ->take_last();
  command
      ->add_option("--max-restarts", flags->max_restarts,
                   "how often in a row, without a new checkpoint, all ranks of "
                   "this host are started again when one has failed; they go "
                   "on from the newest one")
      ->check(whole_number(0, 1000));
  command
      ->add_option("--min-nproc", flags->min_nproc,
                   "when --max-restarts is not enough, that many ranks at "
                   "least go on, the most below those that failed whose number "
                   "the mesh and the batch allow")
      ->check(whole_number(1, 4096));
  command->add_flag("--dry-run", flags->dry_run,
                    "check the configuration, show the plan, and stop");
  command->add_flag("--print-config", flags->print_config,
                    "show every value and where it came from, and stop");
  take_keys(*command);
  command->footer(
      "Every key of the configuration is a flag too: --batch.global=64.\n"
      "Examples:\n"
      "  tessera train run.json --nproc 2\n"
      "  tessera train run.json --deepspeed ds.json --nproc 2\n"
      "  torchrun --no-python --nproc-per-node 2 tessera train run.json");
  command->callback([command, flags, argc, argv] {
    run_as_rank(
        [&] { TrainCommand(*flags, command->remaining()).run(argc, argv); });
  });
}

}  // namespace tessera::cli
