// tessera launch: supervised ranks of any program.
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "tessera/core/error.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/local.h"

namespace tessera::cli {

void add_launch(CLI::App& program) {
  struct Flags {
    int64_t ranks = 0;
    std::string log_dir;
    std::vector<std::string> command;
  };
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = program.add_subcommand(
      "launch", "Start ranks of any program, and watch over them");
  command->add_option("-n,--nproc", flags->ranks, "ranks to start on this host")
      ->required()
      ->check(whole_number(1, 4096));
  command->add_option("--log-dir", flags->log_dir,
                      "folder in which each rank's stderr is kept too");
  command
      ->add_option("program", flags->command,
                   "behind --: the program and its arguments")
      ->required();
  command->footer(
      "Ranks find themselves by launch::discover() and launch::join(). The "
      "first that fails is told,\nand its exit code is this command's.\n"
      "Example: tessera launch -n 4 -- ./my_program --steps 100");
  command->callback([flags] {
    const auto place = launch::discover(launch::process_variables());
    TS_CHECK_USAGE(place.source == "none",
                   "tessera launch: this process is a rank itself, started by ",
                   place.source, ". Start the program without it.");
    set_exit_code(launch::run_local({.nproc = flags->ranks,
                                     .argv = flags->command,
                                     .environment = {},
                                     .log_dir = flags->log_dir}));
  });
}

}  // namespace tessera::cli
