// tessera bench kernels: what each kernel takes here, beside LibTorch's
// operators.
#include <ATen/Parallel.h>

#include <iostream>
#include <memory>

#include "cli/bench_flags.h"
#include "cli/commands.h"
#include "tessera/benchmark/kernels/report.h"
#include "tessera/core/files.h"
#include "tessera/core/vectors.h"
#include "tessera/nn/kernel_choice.h"

namespace tessera::cli {
namespace {

namespace kernels = benchmark::kernels;

struct KernelFlags {
  std::string json;
  int64_t threads = 0;  // 0: the cores that this process may use
  double seconds = 0.5;
};

std::vector<kernels::MakeContest> all_contests() {
  std::vector<kernels::MakeContest> all = kernels::pointwise_contests();
  for (const auto& more :
       {kernels::attention_contests(), kernels::product_contests(),
        kernels::loss_contests(), kernels::update_contests(),
        kernels::expert_contests()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

void run(const KernelFlags& flags, benchmark::Circumstances around) {
  check_output_files({{"--json", flags.json}});
  nn::check_kernels_chosen();
  warn_of_load();
  around.vectors = name_of(widest_vectors());
  around.threads = flags.threads > 0 ? flags.threads : around.cores;
  at::set_num_threads(static_cast<int>(around.threads));
  std::cout << kernels::heading(around) << kernels::column_names()
            << std::flush;
  std::vector<kernels::Row> rows;
  for (const auto& make : all_contests()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      rows.push_back(kernels::measure(make(dtype), flags.seconds));
      std::cout << kernels::line(rows.back()) << std::flush;
    }
  }
  if (flags.json.empty()) return;
  write_file_atomic(flags.json, kernels::json(around, rows));
}

}  // namespace

void add_bench_kernels(CLI::App& bench, int argc, char** argv) {
  CLI::App* command = bench.add_subcommand(
      "kernels", "Time of each kernel beside LibTorch's operators");
  const auto flags = std::make_shared<KernelFlags>();
  command->add_option("--json", flags->json, "file for all figures");
  command
      ->add_option("--threads", flags->threads,
                   "threads to compute with [all cores]")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  command
      ->add_option("--seconds", flags->seconds,
                   "how long a kernel is timed in a type")
      ->check(CLI::Range(1e-3, 3600.0) & is_number())
      ->capture_default_str();
  command->footer(
      "Before a kernel is timed its results are compared with fp64: what is "
      "off is refused by name.\n"
      "Example:\n"
      "  tessera bench kernels --threads 2 --json kernels.json");
  command->callback(
      [flags, argc, argv] { run(*flags, circumstances(argc, argv)); });
}

}  // namespace tessera::cli
