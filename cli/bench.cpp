// tessera bench comm: what the collectives of each backend take here.
#include <ATen/Parallel.h>

#include <filesystem>
#include <iostream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "cli/commands.h"
#include "tessera/comm/bench/measure.h"
#include "tessera/comm/bench/plot.h"
#include "tessera/comm/bench/report.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/host.h"
#include "tessera/core/log.h"
#include "tessera/core/processor.h"
#include "tessera/core/units.h"
#include "tessera/core/version.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/local.h"
#include "tessera/launch/store.h"
#include "tessera/monitor/memory.h"

namespace tessera::cli {
namespace {

namespace bench = comm::bench;

struct BenchFlags {
  int64_t nproc = 0;  // 0: kDefaultRanks, where no launcher has started ranks
  std::string ranks = "processes";
  std::vector<std::string> backends = {"shm"};
  std::vector<std::string> operations = {"all"};
  std::string min_bytes = "4K";
  std::string max_bytes = "64M";
  int64_t step_factor = 4;
  std::vector<std::string> dtypes = {"fp32"};
  std::vector<std::string> redops = {"sum"};
  int64_t iters = 0;
  double seconds = 0.2;
  int64_t warmup = 2;
  bool check = true;
  double timeout_s = 60;
  std::string json;
  std::string plot;
  std::string plot_value = "time";
};

constexpr int64_t kDefaultRanks = 2;

int64_t bytes_of(const char* option, const std::string& text) {
  const auto bytes = parse_bytes(text);
  TS_CHECK_USAGE(bytes && *bytes > 0, option, " ", text,
                 ": expected bytes above 0, as in 4096, 64K or 16M.");
  return *bytes;
}

std::vector<bench::Operation> operations_of(
    const std::vector<std::string>& names) {
  std::vector<bench::Operation> operations;
  for (const std::string& name : names) {
    if (name == "all") return bench::all_operations();
    operations.push_back(*bench::operation_of(name));
  }
  return operations;
}

void check_backends(const std::vector<std::string>& names) {
  std::vector<std::string> built;
  for (const auto& info : comm::backends()) {
    if (info.built && info.name != "fake") built.push_back(info.name);
  }
  for (const std::string& name : names) {
    for (const auto& info : comm::backends()) {
      TS_CHECK_CONFIG(info.name != name || info.built, "--backend ", name, ": ",
                      info.note);
    }
    TS_CHECK_USAGE(std::find(built.begin(), built.end(), name) != built.end(),
                   "--backend ", name, " is not known. Use ",
                   some_of(built, built.size()),
                   ", or several: --backend shm,gloo.");
  }
}

bench::Plan plan_of(const BenchFlags& flags) {
  check_backends(flags.backends);
  bench::Plan plan{.series = flags.backends,
                   .operations = operations_of(flags.operations),
                   .dtypes = {},
                   .redops = {},
                   .sizes = {},
                   .timings = flags.iters,
                   .seconds = flags.seconds,
                   .warmup = flags.warmup,
                   .check = flags.check};
  for (const auto& name : flags.dtypes) {
    plan.dtypes.push_back(*bench::dtype_of(name));
  }
  for (const auto& name : flags.redops) {
    plan.redops.push_back(*bench::redop_of(name));
    for (const at::ScalarType dtype : plan.dtypes) {
      TS_CHECK_USAGE(name != "mean" || at::isFloatingType(dtype),
                     "--redop mean of --dtype ", bench::name_of(dtype),
                     " is not defined. Use sum, or a floating type.");
    }
  }
  const int64_t first = bytes_of("--min-bytes", flags.min_bytes);
  const int64_t last = bytes_of("--max-bytes", flags.max_bytes);
  TS_CHECK_USAGE(first <= last, "--min-bytes ", flags.min_bytes,
                 " is more than --max-bytes ", flags.max_bytes, ".");
  plan.sizes = bench::sizes_between(first, last, flags.step_factor);
  return plan;
}

void check_memory(const bench::Plan& plan, int64_t ranks, int64_t local_ranks) {
  const double needed = static_cast<double>(local_ranks) *
                        static_cast<double>(bench::bytes_of_rank(plan, ranks));
  const int64_t host = monitor::host_memory_bytes();
  TS_CHECK_CONFIG(host == 0 || needed < 0.8 * static_cast<double>(host), "the ",
                  local_ranks, " ranks of this host would hold ",
                  bytes_text(static_cast<uint64_t>(needed)),
                  " of buffers, but it has ", bytes_text(host),
                  ". Lower --max-bytes or --nproc.");
}

// Found out now and not after minutes of measuring.
void check_output(const char* option, const std::string& path) {
  if (path.empty()) return;
  std::error_code ignored;
  TS_CHECK_USAGE(!std::filesystem::is_directory(path, ignored), option, " ",
                 path, " is a folder. Name a file.");
  const auto folder = std::filesystem::absolute(path).parent_path();
  TS_CHECK_IO(std::filesystem::is_directory(folder, ignored), option, " ", path,
              ": there is no folder ", folder.string(), ".");
}

std::string joined(int argc, char** argv) {
  std::string words = "tessera";
  for (int i = 1; i < argc; ++i) words += std::string(" ") + argv[i];
  return words;
}

class BenchCommand {
 public:
  BenchCommand(const BenchFlags& flags, int argc, char** argv)
      : flags_(flags), plan_(plan_of(flags)), argc_(argc), argv_(argv) {
    check_output("--json", flags.json);
    check_output("--plot", flags.plot);
  }

  void run() {
    const auto place = launch::discover(launch::process_variables());
    const bool is_rank = place.source != "none";
    TS_CHECK_USAGE(!is_rank || flags_.nproc == 0 || place.source == "tessera",
                   "--nproc starts ranks, but ", place.source,
                   " has started them already. Leave --nproc out.");
    const int64_t wanted = flags_.nproc > 0 ? flags_.nproc : kDefaultRanks;
    const int64_t ranks = is_rank ? place.world_size : wanted;
    TS_CHECK_USAGE(ranks > 1, "one rank has nobody to talk to. Start two.");
    if (!is_rank) check_memory(plan_, ranks, ranks);
    around_ = {
        .command = joined(argc_, argv_),
        .host = host_name(),
        .processor = processor_name(),
        .cores = launch::available_cores(),
        .ranks = ranks,
        .ranks_are = is_rank ? "processes of " + place.source : flags_.ranks,
        .build = version_line()};
    if (is_rank) return run_rank(place);
    if (flags_.ranks == "threads") return run_threads(ranks);
    launch::LocalOptions options;
    options.nproc = ranks;
    options.argv.assign(argv_, argv_ + argc_);
    options.argv[0] = "/proc/self/exe";
    set_exit_code(launch::run_local(options));
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
    at::set_num_threads(static_cast<int>(std::max<int64_t>(
        1, launch::available_cores() /
               std::max<int64_t>(1, place.local_world_size))));
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
                        [&](const std::string& backend) {
                          auto its = options;
                          its.backend = backend;
                          return comm::make_communicator(its);
                        }},
                   [&](const std::vector<bench::Row>& rows) {
                     if (shows) std::cout << bench::tables(rows) << std::flush;
                     all.insert(all.end(), rows.begin(), rows.end());
                   });
    if (shows) conclude(all);
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
    const int64_t wrong = bench::wrong_in(rows);
    if (wrong == 0) return;
    log::error(wrong, " elements are wrong: see the column #wrong.");
    set_exit_code(static_cast<int>(ExitCode::kFailed));
  }

  const BenchFlags& flags_;
  const bench::Plan plan_;
  const int argc_;
  char** const argv_;
  bench::Circumstances around_;
};

std::vector<std::string> operation_names() {
  std::vector<std::string> names = {"all"};
  for (const auto operation : bench::all_operations()) {
    names.emplace_back(bench::name_of(operation));
  }
  return names;
}

void add_what(CLI::App& command, BenchFlags& flags) {
  const auto& dtypes = bench::dtype_names();
  command
      .add_option("--backend", flags.backends, "one or several, as shm,gloo")
      ->delimiter(',')
      ->capture_default_str();
  command.add_option("--op", flags.operations, "operations, or all")
      ->delimiter(',')
      ->check(CLI::IsMember(operation_names()))
      ->capture_default_str();
  command.add_option("--min-bytes", flags.min_bytes, "the first size")
      ->capture_default_str();
  command.add_option("--max-bytes", flags.max_bytes, "no size is above it")
      ->capture_default_str();
  command.add_option("--step-factor", flags.step_factor, "from size to size")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 30))
      ->capture_default_str();
  command.add_option("--dtype", flags.dtypes, "one or several types")
      ->delimiter(',')
      ->check(
          CLI::IsMember(std::vector<std::string>(dtypes.begin(), dtypes.end())))
      ->capture_default_str();
  command.add_option("--redop", flags.redops, "one or several reductions")
      ->delimiter(',')
      ->check(CLI::IsMember({"sum", "mean", "min", "max", "product"}))
      ->capture_default_str();
}

void add_how(CLI::App& command, BenchFlags& flags) {
  command
      .add_option("--nproc", flags.nproc,
                  c10::str("ranks to start on this host [", kDefaultRanks, "]"))
      ->check(CLI::Range(int64_t{2}, int64_t{4096}));
  command.add_option("--ranks", flags.ranks, "processes or threads")
      ->check(CLI::IsMember({"processes", "threads"}))
      ->capture_default_str();
  auto* seconds = command
                      .add_option("--seconds", flags.seconds,
                                  "how long a size is timed on a backend")
                      ->check(CLI::Range(1e-3, 3600.0))
                      ->capture_default_str();
  command.add_option("--iters", flags.iters, "timings a size, instead")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->excludes(seconds);
  command.add_option("--warmup", flags.warmup, "timings that do not count")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  command.add_flag("--check,!--no-check", flags.check,
                   "compare every element with what is right [on]");
  command
      .add_option("--timeout", flags.timeout_s,
                  "seconds after which an operation fails")
      ->check(CLI::Range(1.0, 7.0 * 24 * 3600))
      ->capture_default_str();
}

void add_output(CLI::App& command, BenchFlags& flags) {
  command.add_option("--json", flags.json, "all figures, to this file");
  command.add_option("--plot", flags.plot, "a drawing, to this SVG file");
  command.add_option("--plot-value", flags.plot_value, "time or busbw")
      ->check(CLI::IsMember({"time", "busbw"}))
      ->capture_default_str();
}

}  // namespace

void add_bench(CLI::App& program, int argc, char** argv) {
  CLI::App* group = program.add_subcommand("bench", "Measure this machine");
  group->require_subcommand(1);
  CLI::App* command = group->add_subcommand(
      "comm", "Time and bandwidth of the collectives of each backend");
  auto flags = std::make_shared<BenchFlags>();
  add_what(*command, *flags);
  add_how(*command, *flags);
  add_output(*command, *flags);
  command->footer(
      "Columns are those of nccl-tests. Several backends are measured in turns "
      "and stand side by side.\n"
      "Examples:\n"
      "  tessera bench comm --nproc 2 --backend shm,gloo --plot comm.svg\n"
      "  mpirun -np 4 tessera bench comm --op all_reduce --max-bytes 1M");
  command->callback(
      [flags, argc, argv] { BenchCommand(*flags, argc, argv).run(); });
}

}  // namespace tessera::cli
