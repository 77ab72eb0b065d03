// tessera launch: supervised ranks of any program.
#include <c10/util/StringUtil.h>

#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/ranks.h"
#include "tessera/core/error.h"
#include "tessera/core/screen.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/local.h"

namespace tessera::cli {
namespace {

struct LaunchFlags {
  int64_t ranks = 0;
  int64_t max_restarts = 0;
  std::string log_dir;
  std::vector<std::string> command;
};

// The exit code of the last start.
int launch_ranks(const LaunchFlags& flags) {
  int64_t restarts = 0;
  while (true) {
    bool was_asked = false;
    const int code = launch::run_local(
        {.nproc = flags.ranks,
         .argv = flags.command,
         .environment = {{"TESSERA_RESTARTS", std::to_string(restarts)}},
         .log_dir = flags.log_dir,
         .was_asked = &was_asked});
    if (was_asked || !may_go_better(code) || flags.max_restarts == 0) {
      return code;
    }
    if (restarts == flags.max_restarts) {
      show_on_screen(c10::str("tessera: ended: all ranks were started again ",
                              restarts, " times\n"));
      return code;
    }
    show_on_screen(c10::str("tessera: all ranks are started again, ",
                            ++restarts, " of ", flags.max_restarts,
                            " times\n"));
  }
}

}  // namespace

void add_launch(CLI::App& program) {
  const auto flags = std::make_shared<LaunchFlags>();
  CLI::App* command = program.add_subcommand(
      "launch", "Start ranks of any program, and watch over them");
  command->add_option("-n,--nproc", flags->ranks, "ranks to start on this host")
      ->required()
      ->check(whole_number(1, 4096));
  command->add_option("--log-dir", flags->log_dir,
                      "folder in which each rank's stderr is kept too");
  command
      ->add_option("--max-restarts", flags->max_restarts,
                   "how often all ranks are started again when one has failed; "
                   "TESSERA_RESTARTS tells them how often they were")
      ->check(whole_number(0, 1000));
  command
      ->add_option("program", flags->command,
                   "behind --: the program and its arguments")
      ->required();
  command->footer(
      "Ranks find themselves by launch::discover() and launch::join(). The "
      "first that fails is told,\nand its exit code is this command's. Those "
      "that end with 2, 74, 75 or 78 would be\nrefused again or were stopped: "
      "they are not started again.\n"
      "Example: tessera launch -n 4 -- ./my_program --steps 100");
  command->callback([flags] {
    const auto place = launch::discover(launch::process_variables());
    TS_CHECK_USAGE(place.source == "none",
                   "tessera launch: this process is a rank itself, started by ",
                   place.source, ". Start the program without it.");
    set_exit_code(launch_ranks(*flags));
  });
}

}  // namespace tessera::cli
