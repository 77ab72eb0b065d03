// What `tessera bench comm` is told: its flags, and the plan that they are. And
// what all of bench ask of theirs.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tessera/benchmark/circumstances.h"
#include "tessera/benchmark/measure.h"

namespace tessera::cli {

constexpr int64_t kDefaultBenchRanks = 2;

struct BenchFlags {
  int64_t nproc =
      0;  // 0: kDefaultBenchRanks, where no launcher has started ranks
  std::string ranks = "processes";
  std::vector<std::string> backends = {"shm"};
  std::vector<std::string> algorithms;  // none: auto, or for --tune all
  bool registered = false;
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
  std::string tune;
};

void add_bench_flags(CLI::App& command, BenchFlags& flags);

// TS_CHECK_USAGE, or for what is not built TS_CHECK_CONFIG, on flags that do
// not go together.
benchmark::Plan plan_of(const BenchFlags& flags);

// Whether --tune is to write a table of the forms of all_to_all, which there
// are between hosts alone, and not one of algorithms.
bool tunes_forms(const BenchFlags& flags);

// Found out before any rank starts, and not after minutes of measuring:
// buffers that the host cannot hold, files that cannot be written.
void check_memory(const benchmark::Plan& plan, int64_t ranks,
                  int64_t local_ranks);

struct OutputFile {
  const char* flag;
  std::string path;  // "": none
};
void check_output_files(const std::vector<OutputFile>& files);

// Says so where others compute here: figures then say little.
void warn_of_load();

// CLI::Range lets NaN through.
CLI::Validator is_number();

// The command as it was typed, and this machine.
benchmark::Circumstances circumstances(int argc, char** argv);

}  // namespace tessera::cli
