// tessera bench step: where a step's time goes, beside its floor.
#include <iostream>

#include "cli/bench_flags.h"
#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/overrides.h"
#include "cli/ranks.h"
#include "tessera/benchmark/step_report.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/core/vectors.h"
#include "tessera/engine/model_sizes.h"
#include "tessera/engine/run_config.h"
#include "tessera/engine/run_devices.h"
#include "tessera/models/model.h"
#include "tessera/train/memory_check.h"

namespace tessera::cli {
namespace {

struct StepFlags {
  std::string file;
  std::vector<std::string> sets;
  RankFlags ranks;
  int64_t rounds = 5;
  std::string json, plot;
};

class BenchStepCommand {
 public:
  BenchStepCommand(const StepFlags& flags,
                   const std::vector<std::string>& extras)
      : flags_(flags) {
    config::Provenance origins;
    config_ = engine::read_run_config(
        flags.file, overrides_of(flags.sets, extras), &origins);
    engine::read_model_folder(config_, origins);
    TS_CHECK_CONFIG(!config_.mesh.star(),
                    "bench step measures ranks; mesh.data_parallel dp has one. "
                    "Use ddp.");
    take_random_tokens(config_);
    config_.model.load_weights = false;
    check_output_files({{"--json", flags.json}, {"--plot", flags.plot}});
  }

  void run(int argc, char** argv) {
    const auto place = find_place(flags_.ranks);
    const int64_t wanted = flags_.ranks.nproc > 0
                               ? flags_.ranks.nproc
                               : engine::implied_world_size(config_);
    const int64_t world = place.source == "none" ? wanted : place.world_size;
    engine::complete(config_, world);
    if (place.source != "tessera" && place.rank == 0) {
      warn_of_load();
      const std::string emulation = engine::emulation_text(config_);
      if (!emulation.empty()) log::info(emulation);
    }
    const RankJob job{
        .comm = config_.comm,
        .devices = engine::devices_of_ranks(config_, world),
        .threads = config_.run.threads,
        .prepare =
            [this](const launch::RankEnvironment& first) {
              train::check_memory(
                  config_,
                  {.first = first.rank, .count = first.local_world_size},
                  train::memory_of_host());
            },
        .work =
            [&](comm::Communicator& ranks) {
              measure(ranks, place, circumstances(argc, argv));
              return static_cast<int>(ExitCode::kOk);
            },
        .arguments = {argv, argv + argc}};
    set_exit_code(run_ranks(job, flags_.ranks, place, world));
  }

 private:
  void measure(comm::Communicator& ranks, const launch::RankEnvironment& place,
               const benchmark::Circumstances& around) const {
    benchmark::MeasuredStep step;
    step.times = benchmark::measure_step(config_, ranks, flags_.rounds);
    if (ranks.rank() != 0) return;
    const int64_t world = ranks.world_size();
    step.around = around;
    step.around.processor += " (" + describe_vectors() + ")";
    step.around.ranks = world;
    step.around.ranks_are = place.source == "none" || place.source == "tessera"
                                ? flags_.ranks.ranks
                                : "processes of " + place.source;
    step.around.threads = step.times.threads;
    step.model = models::describe(config_.model);
    step.mesh = engine::mesh_of(config_, world).describe();
    step.compute = config_.precision.compute;
    step.samples = config_.batch.global;
    step.tokens = config_.data.seq_len;
    std::cout << benchmark::step_text(step) << std::flush;
    if (!flags_.json.empty()) {
      write_file_atomic(flags_.json, benchmark::step_json(step));
    }
    if (!flags_.plot.empty()) {
      write_file_atomic(flags_.plot, benchmark::step_picture(step));
    }
  }

  const StepFlags& flags_;
  engine::RunConfig config_;
};

}  // namespace

void add_bench_step(CLI::App& bench, int argc, char** argv) {
  CLI::App* command = bench.add_subcommand(
      "step", "Where a step's time goes, beside its matrix products alone");
  auto flags = std::make_shared<StepFlags>();
  command->add_option("RUN.json", flags->file, "the configuration")->required();
  add_sets(*command, flags->sets);
  add_rank_flags(*command, flags->ranks);
  command
      ->add_option("--rounds", flags->rounds,
                   "steps to measure, each behind its floor")
      ->check(whole_number(1, 10000));
  command->add_option("--json", flags->json, "all figures, to this file");
  command->add_option("--plot", flags->plot, "a picture (SVG), to this file");
  take_keys(*command);
  command->footer(
      "The floor is the step's matrix products alone: same shapes, type and "
      "threads, each by the fastest call there is. Tokens are random, weights "
      "too: nothing is read.\n"
      "Examples:\n"
      "  tessera bench step run.json --plot step.svg\n"
      "  tessera bench step run.json --mesh.tp=2 --precision.compute=bf16");
  command->callback([command, flags, argc, argv] {
    run_as_rank([&] {
      BenchStepCommand(*flags, command->remaining()).run(argc, argv);
    });
  });
}

}  // namespace tessera::cli
