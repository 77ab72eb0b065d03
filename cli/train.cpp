// tessera train: from a configuration file to a trained model.
#include <ATen/Parallel.h>

#include <iostream>
#include <thread>

#include "cli/commands.h"
#include "cli/overrides.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/engine/run_config.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/local.h"
#include "tessera/launch/signals.h"
#include "tessera/launch/store.h"
#include "tessera/monitor/memory.h"
#include "tessera/train/preflight.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/trainer.h"

namespace tessera::cli {
namespace {

struct TrainFlags {
  std::string file;
  std::vector<std::string> sets;
  int64_t nproc = 0;  // 0: as many as the mesh asks for
  std::string ranks = "processes";
  std::string resume = "auto";
  bool dry_run = false;
  bool print_config = false;
};

void share_out_cores(const engine::RunConfig& config, int64_t local_ranks) {
  const int64_t share = std::max<int64_t>(
      1, launch::available_cores() / std::max<int64_t>(1, local_ranks));
  at::set_num_threads(
      static_cast<int>(config.run.threads > 0 ? config.run.threads : share));
}

std::chrono::milliseconds timeout_of(const engine::RunConfig& config) {
  return std::chrono::milliseconds(
      static_cast<int64_t>(config.comm.timeout_s * 1000));
}

// Ranks that another launcher started: the first of each host checks and
// prepares what `tessera train --nproc` does before it starts any, and the
// others wait for it, however long a text takes to tokenize.
void prepare_on_host(const engine::RunConfig& config,
                     const launch::Meeting& meeting) {
  constexpr std::chrono::milliseconds kBetweenLooks{100};
  const auto& place = meeting.environment;
  const std::string key = c10::str("prepared/", place.node);
  const auto tell = [&](const std::string& words) {
    meeting.store->set(key, std::vector<uint8_t>(words.begin(), words.end()));
  };
  if (place.local_rank == 0) {
    try {
      train::preflight(config);
    } catch (const std::exception& error) {
      tell(message_of(error));
      throw;
    }
    return tell("");
  }
  while (!meeting.store->check({key})) {
    std::this_thread::sleep_for(kBetweenLooks);
  }
  const auto words = meeting.store->get(key);
  TS_CHECK(words.empty(), "the first rank of this host could not prepare: ",
           std::string(words.begin(), words.end()));
}

// This process is one rank; its peers are elsewhere.
int run_rank(const engine::RunConfig& config,
             const launch::RankEnvironment& environment,
             const train::TrainOptions& options) {
  const launch::Meeting meeting = launch::join(environment);
  const auto& place = meeting.environment;
  const bool is_prepared = place.source == "tessera" || place.source == "none";
  if (!is_prepared) prepare_on_host(config, meeting);
  RankContextGuard guard({.rank = static_cast<int>(place.rank),
                          .world_size = static_cast<int>(place.world_size)});
  share_out_cores(config, place.local_world_size);
  monitor::count_tensor_bytes();
  if (place.source != "none") log::info(place.describe());
  const auto ranks = comm::make_communicator(
      {.backend = config.comm.backend,
       .algorithm = config.comm.algorithm,
       .rank = place.rank,
       .world_size = place.world_size,
       .local_world_size = place.local_world_size,
       .store = meeting.store,
       .timeout = timeout_of(config),
       .address = meeting.address,
       .record_folder = train::RunFolder(config).logs()});
  return static_cast<int>(train::train(config, *ranks, options));
}

// All ranks are threads of this process.
int run_rank_threads(const engine::RunConfig& config, int64_t world_size,
                     const train::TrainOptions& options) {
  std::vector<ExitCode> codes(world_size, ExitCode::kFailed);
  monitor::count_tensor_bytes();
  comm::run_threads({.backend = config.comm.backend,
                     .algorithm = config.comm.algorithm,
                     .world_size = world_size,
                     .local_world_size = world_size,
                     .timeout = timeout_of(config),
                     .record_folder = train::RunFolder(config).logs()},
                    [&](comm::Communicator& ranks) {
                      const monitor::RankMemory memory;
                      share_out_cores(config, world_size);
                      codes[ranks.rank()] =
                          train::train(config, ranks, options);
                    });
  return static_cast<int>(codes[0]);
}

// Starts the ranks as processes of this same command.
int run_rank_processes(int64_t world_size, int argc, char** argv) {
  launch::LocalOptions options;
  options.nproc = world_size;
  options.argv.assign(argv, argv + argc);
  options.argv[0] = "/proc/self/exe";
  return launch::run_local(options);
}

class TrainCommand {
 public:
  TrainCommand(TrainFlags flags, const std::vector<std::string>& extras)
      : flags_(std::move(flags)) {
    config_ = engine::read_run_config(
        flags_.file, overrides_of(flags_.sets, extras), &origins_);
    engine::read_model_folder(config_, origins_);
  }

  void run(int argc, char** argv) {
    const auto place = launch::discover(launch::process_variables());
    const bool is_rank = place.source != "none";
    TS_CHECK_USAGE(!is_rank || flags_.nproc == 0 || place.source == "tessera",
                   "--nproc starts ranks, but ", place.source,
                   " has started them already. Leave --nproc out.");
    TS_CHECK_USAGE(!star() || flags_.nproc <= 1, "--nproc ", flags_.nproc,
                   " with mesh.data_parallel dp, "
                   "whose devices are threads of one process. Set mesh.dp to "
                   "their number and leave --nproc out.");
    const int64_t world_size = is_rank ? place.world_size : wanted_world();
    engine::complete(config_,
                     star() ? engine::implied_world_size(config_) : world_size);
    if (show_only()) return;
    // The ranks that this program starts have heard of it from their launcher.
    if (place.source != "tessera" && place.rank == 0) warn_of_idle_keys();
    if (is_rank) {
      launch::StopRequest stop;
      return set_exit_code(run_rank(config_, place, options(stop)));
    }
    start(world_size, place, argc, argv);
  }

 private:
  // Data parallelism on threads around device 0: one rank, many devices.
  bool star() const { return config_.mesh.data_parallel == "dp"; }

  int64_t wanted_world() const {
    if (star()) return 1;
    return flags_.nproc > 0 ? flags_.nproc
                            : engine::implied_world_size(config_);
  }

  bool show_only() const {
    if (flags_.print_config) {
      engine::RunConfig copy = config_;
      config::Section root;
      copy.declare(root);
      std::cout << config::print(root, origins_);
    }
    if (flags_.dry_run) {
      warn_of_idle_keys();
      train::check_paths(config_);
      std::cout << train::describe_plan(config_);
    }
    return flags_.print_config || flags_.dry_run;
  }

  void warn_of_idle_keys() const {
    for (const auto& idle : engine::without_effect(config_, origins_)) {
      log::warning(idle);
    }
  }

  void start(int64_t world_size, const launch::RankEnvironment& place, int argc,
             char** argv) {
    TS_CHECK_CONFIG(world_size == 1 || config_.comm.backend != "mpi",
                    "comm.backend is mpi, whose ranks are started by mpirun. "
                    "Use mpirun -np ",
                    world_size, " tessera train ..., without --nproc.");
    train::preflight(config_);
    if (world_size > 1 && flags_.ranks == "processes") {
      return set_exit_code(run_rank_processes(world_size, argc, argv));
    }
    launch::StopRequest stop;
    set_exit_code(world_size == 1
                      ? run_rank(config_, place, options(stop))
                      : run_rank_threads(config_, world_size, options(stop)));
  }

  train::TrainOptions options(const launch::StopRequest& stop) const {
    return {.resume = flags_.resume,
            .stop_requested = [&stop] { return stop.requested(); }};
  }

  TrainFlags flags_;
  engine::RunConfig config_;
  config::Provenance origins_;
};

}  // namespace

void add_train(CLI::App& program, int argc, char** argv) {
  CLI::App* command = program.add_subcommand("train", "Train a model");
  auto flags = std::make_shared<TrainFlags>();
  command->add_option("RUN.json", flags->file, "the configuration")->required();
  command->add_option("--set", flags->sets, "key=value, as in batch.global=64");
  command->add_option("--nproc", flags->nproc, "ranks to start on this host")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  command->add_option("--ranks", flags->ranks, "processes or threads")
      ->check(CLI::IsMember({"processes", "threads"}));
  command->add_option("--resume", flags->resume,
                      "auto, never, or a checkpoint folder");
  command->add_flag("--dry-run", flags->dry_run,
                    "check the configuration, show the plan, and stop");
  command->add_flag("--print-config", flags->print_config,
                    "show every value and where it came from, and stop");
  command->allow_extras();
  command->footer(
      "Every key of the configuration is a flag too: --batch.global=64.\n"
      "Examples:\n"
      "  tessera train run.json --nproc 2\n"
      "  torchrun --no-python --nproc-per-node 2 tessera train run.json");
  command->callback([command, flags, argc, argv] {
    TrainCommand(*flags, command->remaining()).run(argc, argv);
  });
}

}  // namespace tessera::cli
