// tessera verify: does this mesh train the model that one rank trains?
#include <c10/util/Exception.h>
#include <iomanip>
#include <iostream>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/overrides.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/engine/model_sizes.h"
#include "tessera/engine/run_config.h"
#include "tessera/models/model.h"
#include "tessera/train/memory_check.h"
#include "tessera/verify/verify.h"

namespace tessera::cli {
namespace {

struct VerifyFlags {
  std::string file;
  std::vector<std::string> sets;
  int64_t nproc = 0;  // 0: as many as the mesh asks for
  int64_t steps = 3;
  std::string precision = "fp64";
  bool shrink = false;
};

constexpr size_t kNamedAtMost = 20;

void print(const verify::Verification& found) {
  const auto line = [](const char* what, double largest) {
    std::cout << std::left << std::setw(12) << what << std::scientific
              << std::setprecision(1) << largest << "\n";
  };
  std::cout << "largest difference over " << found.steps
            << " steps, relative:\n";
  line("loss", found.loss);
  line("grad_norm", found.grad_norm);
  line("gradients", found.gradients);
  line("weights", found.weights);
  line("optimizer", found.optimizer);
  for (size_t i = 0; i < found.differences.size(); ++i) {
    if (i == kNamedAtMost) {
      std::cout << "... and " << found.differences.size() - i << " more\n";
      break;
    }
    std::cout << found.differences[i].describe() << "\n";
  }
  std::cout << (found.equal()
                    ? "equal: this mesh trains the model that one rank trains\n"
                    : "DIFFERENT: this mesh does not train the model that one "
                      "rank trains\n");
}

// Rounding is no fault, and in fp32 it may cross a bound, or move a token that
// is near a tie to another expert.
constexpr const char* kFp32Hint =
    "in fp32 this may be rounding: without --precision fp32 it is told from a "
    "fault\n";

// A model too large for a GPU is the user's to make smaller.
verify::Verification compare(const engine::RunConfig& config, int64_t world,
                             const VerifyFlags& flags) {
  try {
    return verify::verify(config, world, flags.steps, flags.precision);
  } catch (const c10::OutOfMemoryError& error) {
    TS_CHECK_CONFIG(
        false, train::out_of_memory_text(error), " verify computes in ",
        flags.precision, ", its ranks on the GPUs of this host. Use ",
        flags.shrink ? "" : "--shrink, a small model of the same kind, or ",
        "--run.device=cpu.");
  }
}

void run(const VerifyFlags& flags, const std::vector<std::string>& extras) {
  config::Provenance origins;
  auto config = engine::read_run_config(
      flags.file, overrides_of(flags.sets, extras), &origins);
  engine::read_model_folder(config, origins);
  TS_CHECK_CONFIG(!config.mesh.star(),
                  "verify compares ranks; mesh.data_parallel dp has one. Use "
                  "ddp.");
  // It trains on random tokens, on the CPU whatever the run's device, but where
  // the command line says one.
  take_random_tokens(config);
  if (!origins.at("run.device").starts_with("--")) config.run.device = "cpu";
  if (config.precision.products != "same") {
    log::info("precision.products is ", config.precision.products,
              ", which is left out: products are in ", flags.precision);
    config.precision.products = "same";
  }
  const int64_t world =
      flags.nproc > 0 ? flags.nproc : engine::implied_world_size(config);
  engine::complete(config, world);
  if (flags.shrink) {
    if (config.model.load_weights) {
      log::info("--shrink: its weights, and adapters, are random; those of ",
                config.model.from, " are of another size");
    }
    config = verify::shrunk(std::move(config), world);
  }
  std::cout << "model       " << config.model.family << ", "
            << models::num_parameters(config.model) << " parameters, layers "
            << config.model.layers << ", hidden " << config.model.hidden
            << ", vocab " << config.model.vocab << "\n"
            << "mesh        " << engine::mesh_of(config, world).describe()
            << " ranks as threads, in " << flags.precision
            << (config.run.is_on_cpu() ? ""
                                       : ", on " + config.run.device_text() +
                                             ", beside one rank on the CPU")
            << std::endl;
  const auto found = compare(config, world, flags);
  print(found);
  if (!found.equal() && flags.precision == "fp32") std::cout << kFp32Hint;
  set_exit_code(
      static_cast<int>(found.equal() ? ExitCode::kOk : ExitCode::kFailed));
}

}  // namespace

void add_verify(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "verify", "Prove that a mesh trains the same model as one rank");
  auto flags = std::make_shared<VerifyFlags>();
  command->add_option("RUN.json", flags->file, "the configuration")->required();
  add_sets(*command, flags->sets);
  command->add_option("--nproc", flags->nproc, "ranks, as threads")
      ->check(whole_number(1, 4096));
  command->add_option("--steps", flags->steps, "steps to compare")
      ->check(whole_number(1, 1000));
  command
      ->add_option("--precision", flags->precision,
                   "fp64, or fp32 with the bounds of its rounding")
      ->check(CLI::IsMember({"fp64", "fp32"}));
  command->add_flag("--shrink", flags->shrink,
                    "a small model of the same kind: seconds, not hours");
  take_keys(*command);
  command->footer(
      "With --run.device=cuda the mesh computes on GPUs, beside one rank on "
      "the CPU.\n"
      "Example:\n  tessera verify run.json --shrink --mesh.tp=2");
  command->callback([command, flags] { run(*flags, command->remaining()); });
}

}  // namespace tessera::cli
