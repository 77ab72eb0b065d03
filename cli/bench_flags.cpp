#include "cli/bench_flags.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "tessera/benchmark/tune.h"
#include "tessera/comm/comm_config.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/host.h"
#include "tessera/core/log.h"
#include "tessera/core/processor.h"
#include "tessera/core/units.h"
#include "tessera/core/version.h"
#include "tessera/launch/cores.h"
#include "tessera/monitor/memory.h"

namespace tessera::cli {
namespace {

namespace bench = benchmark;

int64_t bytes_of(const char* option, const std::string& text) {
  const auto bytes = parse_bytes(text);
  TS_CHECK_USAGE(bytes && *bytes > 0, option, " ", text,
                 ": expected bytes above 0, as in 4096, 64K or 16M.");
  return *bytes;
}

std::vector<bench::Operation> operations_of(const BenchFlags& flags) {
  std::vector<bench::Operation> operations;
  for (const std::string& name : flags.operations) {
    if (name == "all") {
      return flags.tune.empty() ? bench::all_operations()
                                : bench::tunable_operations();
    }
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
    TS_CHECK_CONFIG(name != "nccl",
                    "--backend nccl: it carries no tensors of the CPU, which "
                    "are what is measured. Leave it out.");
    TS_CHECK_USAGE(std::find(built.begin(), built.end(), name) != built.end(),
                   "--backend ", name, " is not known. Use ",
                   some_of(built, built.size()),
                   ", or several: --backend shm,gloo.");
  }
}

bool holds(const auto& list, const auto& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// Every backend with every algorithm; shm also with registered buffers.
std::vector<bench::Series> series_of(const BenchFlags& flags) {
  check_backends(flags.backends);
  TS_CHECK_USAGE(!flags.registered || holds(flags.backends, "shm"),
                 "--registered: of the backends, shm alone has registered "
                 "memory. Add --backend shm.");
  std::vector<std::string> algorithms = flags.algorithms;
  if (algorithms.empty()) {
    algorithms = flags.tune.empty()   ? std::vector<std::string>{"auto"}
                 : tunes_forms(flags) ? bench::forms_of_all_to_all()
                                      : bench::tunable_algorithms();
  }
  std::vector<bench::Series> series;
  for (const std::string& backend : flags.backends) {
    for (const std::string& algorithm : algorithms) {
      series.push_back({.backend = backend, .algorithm = algorithm});
    }
    if (flags.registered && backend == "shm") {
      series.push_back({.backend = backend, .registered = true});
    }
  }
  return series;
}

// Each operation has something to measure.
void check_served(const bench::Plan& plan) {
  for (const bench::Operation operation : plan.operations) {
    const bool served = std::any_of(
        plan.series.begin(), plan.series.end(),
        [&](const auto& series) { return series.serves(operation); });
    TS_CHECK_USAGE(served, "--algorithm ", plan.series[0].algorithm, " has no ",
                   bench::name_of(operation),
                   ". Choose others with --op, or add --algorithm auto.");
  }
}

// Whether each backend is measured with each form, and with nothing else.
void check_forms(const bench::Plan& plan) {
  for (const bench::Series& series : plan.series) {
    bool all = holds(bench::forms_of_all_to_all(), series.algorithm);
    for (const std::string& form : bench::forms_of_all_to_all()) {
      all &= std::ranges::any_of(plan.series, [&](const auto& other) {
        return other.backend == series.backend && other.algorithm == form;
      });
    }
    TS_CHECK_USAGE(all,
                   "--tune of all_to_all compares its forms. Use --algorithm "
                   "straight,aggregated, or leave it out.");
  }
}

void check_algorithms(const bench::Plan& plan) {
  for (const bench::Operation operation : plan.operations) {
    TS_CHECK_USAGE(operation != bench::Operation::kAllToAll,
                   "--tune: all_to_all has a table of its own, of its forms "
                   "between hosts. Leave it out of --op, or name it alone.");
    TS_CHECK_USAGE(holds(bench::tunable_operations(), operation),
                   "--tune: ", bench::name_of(operation),
                   " has one algorithm only. Leave it out of --op.");
  }
  bool has_own = false;
  for (const bench::Series& series : plan.series) {
    TS_CHECK_USAGE(holds(bench::tunable_algorithms(), series.algorithm),
                   "--tune: a table cannot name --algorithm ", series.algorithm,
                   ".");
    has_own |= series.algorithm == "auto";
  }
  TS_CHECK_USAGE(has_own,
                 "--tune needs what it compares with. Add --algorithm auto.");
}

void check_tune(const bench::Plan& plan, bool of_forms) {
  TS_CHECK_USAGE(plan.dtypes.size() == 1 && plan.redops.size() == 1,
                 "--tune chooses by the times of one type and one reduction. "
                 "Name one --dtype and one --redop.");
  TS_CHECK_USAGE(plan.check,
                 "--tune names algorithms by which runs then compute: it needs "
                 "the check. Leave --no-check out.");
  of_forms ? check_forms(plan) : check_algorithms(plan);
  TS_CHECK_USAGE(std::getenv("TESSERA_COMM_TABLE") == nullptr,
                 "--tune compares with each backend's own algorithm, but "
                 "TESSERA_COMM_TABLE puts others in its place. Unset it.");
}

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
  command
      .add_option("--algorithm", flags.algorithms,
                  "one or several, each with each backend [auto]")
      ->delimiter(',')
      ->check(CLI::IsMember(comm::algorithm_choices()));
  command.add_flag("--registered", flags.registered,
                   "shm also with buffers that peers reach without a copy");
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
      .add_option(
          "--nproc", flags.nproc,
          c10::str("ranks to start on this host [", kDefaultBenchRanks, "]"))
      ->check(CLI::Range(int64_t{2}, int64_t{4096}));
  command.add_option("--ranks", flags.ranks, "processes or threads")
      ->check(CLI::IsMember({"processes", "threads"}))
      ->capture_default_str();
  auto* seconds = command
                      .add_option("--seconds", flags.seconds,
                                  "how long a size is timed on a backend")
                      ->check(CLI::Range(1e-3, 3600.0) & is_number())
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
      ->check(CLI::Range(1.0, 7.0 * 24 * 3600) & is_number())
      ->capture_default_str();
}

void add_output(CLI::App& command, BenchFlags& flags) {
  command.add_option("--json", flags.json, "all figures, to this file");
  command.add_option("--plot", flags.plot, "a drawing, to this SVG file");
  command.add_option("--plot-value", flags.plot_value, "time or busbw")
      ->check(CLI::IsMember({"time", "busbw"}))
      ->capture_default_str();
  command
      .add_option("--tune", flags.tune,
                  "the fastest algorithms, to this file: a table for "
                  "TESSERA_COMM_TABLE")
      ->excludes("--registered");
}

void check_output(const char* option, const std::string& path) {
  if (path.empty()) return;
  std::error_code ignored;
  TS_CHECK_USAGE(!std::filesystem::is_directory(path, ignored), option, " ",
                 path, " is a folder. Name a file.");
  const auto folder = std::filesystem::absolute(path).parent_path();
  TS_CHECK_IO(std::filesystem::is_directory(folder, ignored), option, " ", path,
              ": there is no folder ", folder.string(), ".");
}

}  // namespace

bool tunes_forms(const BenchFlags& flags) {
  return !flags.tune.empty() && flags.operations.size() == 1 &&
         flags.operations[0] == bench::name_of(bench::Operation::kAllToAll);
}

CLI::Validator is_number() {
  return {[](const std::string& text) {
            return std::isnan(std::strtod(text.c_str(), nullptr))
                       ? "Value " + text + " is not a number"
                       : std::string();
          },
          ""};
}

bench::Circumstances circumstances(int argc, char** argv) {
  std::string words = "tessera";
  for (int i = 1; i < argc; ++i) words += std::string(" ") + argv[i];
  return {.command = words,
          .host = host_name(),
          .processor = processor_name(),
          .cores = launch::available_cores(),
          .build = version_line()};
}

bench::Plan plan_of(const BenchFlags& flags) {
  bench::Plan plan{.series = series_of(flags),
                   .operations = operations_of(flags),
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
  constexpr int64_t kMostBytes = int64_t{1} << 46;  // no host holds them
  TS_CHECK_USAGE(last <= kMostBytes, "--max-bytes ", flags.max_bytes,
                 " is more than ", bytes_text(kMostBytes), ".");
  TS_CHECK_USAGE(first <= last, "--min-bytes ", flags.min_bytes,
                 " is more than --max-bytes ", flags.max_bytes, ".");
  plan.sizes = bench::sizes_between(first, last, flags.step_factor);
  check_served(plan);
  if (!flags.tune.empty()) check_tune(plan, tunes_forms(flags));
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

void warn_of_load() {
  double load = 0;  // processes that ran or wanted to, over the last minute
  const auto cores = static_cast<double>(launch::available_cores());
  if (::getloadavg(&load, 1) != 1 || load < cores / 2) return;
  log::warning("the last minute had ", load, " processes at work on ", cores,
               " cores: figures of a busy machine say little");
}

void check_output_files(const std::vector<OutputFile>& files) {
  for (auto file = files.begin(); file != files.end(); ++file) {
    check_output(file->flag, file->path);
    const auto again =
        std::ranges::find(file + 1, files.end(), file->path, &OutputFile::path);
    TS_CHECK_USAGE(file->path.empty() || again == files.end(), file->flag,
                   " and ", again->flag, " both name ", file->path,
                   ". Name another file.");
  }
}

void add_bench_flags(CLI::App& command, BenchFlags& flags) {
  add_what(command, flags);
  add_how(command, flags);
  add_output(command, flags);
}

}  // namespace tessera::cli
