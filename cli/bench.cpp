// tessera bench, and bench comm: what the collectives of each backend take.

#include <algorithm>
#include <iostream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "cli/bench_flags.h"
#include "cli/commands.h"
#include "cli/ranks.h"
#include "tessera/benchmark/measure.h"
#include "tessera/benchmark/plot.h"
#include "tessera/benchmark/report.h"
#include "tessera/benchmark/tune.h"
#include "tessera/comm/comm_config.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/broken_pipe.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/launch/cores.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/store.h"

namespace tessera::cli {
namespace {

namespace bench = benchmark;

class BenchCommand {
 public:
  BenchCommand(const BenchFlags& flags, int argc, char** argv)
      : flags_(flags), plan_(plan_of(flags)), argc_(argc), argv_(argv) {
    check_output_files({{"--json", flags.json},
                        {"--plot", flags.plot},
                        {"--tune", flags.tune}});
  }

  void run() {
    const auto place =
        find_place({.nproc = flags_.nproc, .ranks = flags_.ranks});
    const bool is_rank = place.source != "none";
    const int64_t wanted = flags_.nproc > 0 ? flags_.nproc : kDefaultBenchRanks;
    const int64_t ranks = is_rank ? place.world_size : wanted;
    TS_CHECK_USAGE(ranks > 1, "one rank has nobody to talk to. Start two.");
    if (is_rank) {
      hosts_ = ranks / std::max<int64_t>(1, place.local_world_size);
    }
    TS_CHECK_USAGE(
        !tunes_forms(flags_) || (hosts_ > 1 && hosts_ < ranks &&
                                 hosts_ * place.local_world_size == ranks),
        "--tune of all_to_all compares its forms between hosts, each of the "
        "same number of ranks, two or more. Start them there by a launcher.");
    if (place.source != "tessera") {  // else its launcher has done it
      check_memory(
          plan_, ranks,
          is_rank ? std::max<int64_t>(1, place.local_world_size) : ranks);
    }
    around_ = circumstances(argc_, argv_);
    around_.ranks = ranks;
    around_.ranks_are = is_rank ? "processes of " + place.source : flags_.ranks;
    if (place.source != "tessera" && place.rank == 0) warn_of_load();
    ignore_broken_pipes();  // who reads along may stop before the ranks do
    if (is_rank) return run_rank(place);
    comm::check_tuning_table();
    for (const bench::Series& series : plan_.series) {
      TS_CHECK_USAGE(series.backend != "mpi",
                     "the ranks of --backend mpi are started by mpirun. Use "
                     "mpirun -np ",
                     ranks, " tessera bench comm ..., without --nproc.");
    }
    if (flags_.ranks == "threads") return run_threads(ranks);
    set_exit_code(run_rank_processes({argv_, argv_ + argc_}, ranks));
  }

 private:
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(
        static_cast<int64_t>(flags_.timeout_s * 1000));
  }

  // This process is one rank; its peers are elsewhere.
  void run_rank(const launch::RankEnvironment& environment) {
    const launch::Meeting meeting = launch::join(environment);
    const auto& place = meeting.environment;
    RankContextGuard guard({.rank = static_cast<int>(place.rank),
                            .world_size = static_cast<int>(place.world_size)});
    launch::take_cores(/*threads=*/0, place.local_world_size);
    const comm::CommunicatorOptions options{
        .backend = "auto",
        .rank = place.rank,
        .world_size = place.world_size,
        .local_world_size = place.local_world_size,
        .store = meeting.store,
        .timeout = timeout(),
        .address = meeting.address};
    const auto control = comm::make_communicator(options);
    measure(*control, options);
  }

  // All ranks are threads of this process.
  void run_threads(int64_t world_size) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    comm::run_threads(
        world_size, "auto",
        [&](comm::Communicator& control) {
          measure(control, {.rank = control.rank(),
                            .world_size = world_size,
                            .local_world_size = world_size,
                            .store = store,
                            .timeout = timeout()});
        },
        timeout());
  }

  void measure(comm::Communicator& control,
               const comm::CommunicatorOptions& options) {
    std::vector<bench::Row> all;
    const bool shows = control.rank() == 0;
    if (shows) std::cout << bench::heading(around_) << std::flush;
    bench::measure(plan_,
                   {.control = control,
                    .make =
                        [&](const bench::Series& series) {
                          auto its = options;
                          its.backend = series.backend;
                          its.algorithm = series.algorithm;
                          return communicator_of(its);
                        }},
                   [&](const std::vector<bench::Row>& rows) {
                     if (shows) std::cout << bench::tables(rows) << std::flush;
                     all.insert(all.end(), rows.begin(), rows.end());
                   });
    if (shows) conclude(all);
  }

  std::unique_ptr<comm::Communicator> communicator_of(
      const comm::CommunicatorOptions& options) const {
    auto made = comm::make_communicator(options);
    TS_CHECK_USAGE(
        !tunes_forms(flags_) || made->world().backend() != "shm",
        "--tune of all_to_all: all ranks are on one host, which has no forms "
        "of it. Start them on several.");
    return made;
  }

  void conclude(const std::vector<bench::Row>& rows) const {
    if (!flags_.json.empty()) {
      write_file_atomic(flags_.json, bench::json(around_, rows));
    }
    if (!flags_.plot.empty()) {
      const auto value = flags_.plot_value == "time"
                             ? bench::Plotted::kTime
                             : bench::Plotted::kBusBandwidth;
      const std::string title =
          c10::str(around_.ranks, " ranks (", around_.ranks_are, "), ",
                   around_.processor);
      write_file_atomic(flags_.plot, bench::plot(rows, value, title));
    }
    if (!flags_.tune.empty()) write_table(rows);
    const int64_t wrong = bench::wrong_in(rows);
    if (wrong == 0) return;
    log::error(wrong, " elements are wrong: see the column #wrong.");
    set_exit_code(static_cast<int>(ExitCode::kFailed));
  }

  void write_table(const std::vector<bench::Row>& rows) const {
    const auto table =
        bench::tuning_table(rows,
                            c10::str(around_.host, ", ", around_.cores,
                                     " cores, ", around_.processor),
                            hosts_);
    table.write(flags_.tune);
    std::cout << "\n# " << flags_.tune << ": " << table.entries().size()
              << (tunes_forms(flags_) ? " ranges, each with the faster form"
                                      : " ranges in which another algorithm is "
                                        "faster than the backend's own")
              << "; TESSERA_COMM_TABLE=" << flags_.tune << " uses them\n";
  }

  const BenchFlags& flags_;
  const bench::Plan plan_;
  const int argc_;
  char** const argv_;
  bench::Circumstances around_;
  int64_t hosts_ = 1;
};

}  // namespace

void add_bench(CLI::App& program, int argc, char** argv) {
  CLI::App* group = program.add_subcommand("bench", "Measure this machine");
  group->require_subcommand(1);
  CLI::App* command = group->add_subcommand(
      "comm", "Time and bandwidth of the collectives of each backend");
  auto flags = std::make_shared<BenchFlags>();
  add_bench_flags(*command, *flags);
  command->footer(
      "Columns are those of nccl-tests. Several backends are measured in turns "
      "and stand side by side.\n"
      "Examples:\n"
      "  tessera bench comm --nproc 2 --backend shm,gloo --plot comm.svg\n"
      "  mpirun -np 4 tessera bench comm --op all_reduce --max-bytes 1M\n"
      "  tessera bench comm --nproc 4 --backend gloo --tune table.json");
  command->callback(
      [flags, argc, argv] { BenchCommand(*flags, argc, argv).run(); });
  add_bench_step(*group, argc, argv);
  add_bench_kernels(*group, argc, argv);
}

}  // namespace tessera::cli
