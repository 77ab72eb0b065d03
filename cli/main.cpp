// tessera: the program. Results go to stdout, everything else to stderr.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "cli/out_of_memory.h"
#include "cli/sanitizers.h"
#include "cli/unreadable_files.h"
#include "tessera/core/broken_pipe.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/core/exit_code.h"
#include "tessera/core/printable.h"
#include "tessera/core/version.h"

namespace tessera::cli {
namespace {

int exit_code = static_cast<int>(ExitCode::kOk);

std::vector<std::string> names_of_commands(const CLI::App& program) {
  std::vector<std::string> names;
  for (const CLI::App* command : program.get_subcommands(nullptr)) {
    names.push_back(command->get_name());
  }
  return names;
}

bool is_command(const CLI::App& program, const std::string& word) {
  return std::ranges::count(names_of_commands(program), word) > 0;
}

// "tessera help train" as "tessera train --help", the last word first.
std::vector<std::string> words_of_help(int argc, char** argv) {
  std::vector<std::string> words = {"--help"};
  for (int i = argc - 1; i >= 2; --i) words.emplace_back(argv[i]);
  return words;
}

int usage_error(const CLI::App& program, const std::string& message,
                const std::string& first_word) {
  std::cerr << "tessera: " << printable(message, true) << "\n";
  if (!is_command(program, first_word)) {
    if (const auto meant =
            config::nearest(first_word, names_of_commands(program))) {
      std::cerr << "Did you mean 'tessera " << *meant << "'?\n";
    }
  }
  std::cerr << "'tessera --help' and 'tessera COMMAND --help' tell more.\n";
  return static_cast<int>(ExitCode::kUsage);
}

// What a library threw says too little.
std::string words_for(const std::exception& error) {
  const std::string words = message_of(error);
  const auto code = exit_code_of(error);
  if (dynamic_cast<const c10::DistError*>(&error) != nullptr) {
    return "the rendezvous or a peer is gone: " + words;
  }
  const auto* of_system = dynamic_cast<const std::system_error*>(&error);
  const bool is_thread =
      of_system != nullptr && code == ExitCode::kFailed &&
      of_system->code() == std::errc::resource_unavailable_try_again;
  return words + (is_thread ? ": no thread can be started. Raise the limits on "
                              "memory and tasks (ulimit -v, ulimit -u), or "
                              "start fewer ranks here."
                            : "");
}

int failed(const std::string& message, ExitCode code) {
  std::cerr << "tessera: error: " << printable(message, true) << std::endl;
  return static_cast<int>(code);
}

// `code`, once what was said has left this process.
int written(int code) {
  if (std::cout.flush().good() || is_broken_pipe(STDOUT_FILENO)) return code;
  return failed("standard output cannot be written. Is the disk full?",
                ExitCode::kInputOutput);
}

}  // namespace

void set_exit_code(int code) { exit_code = code; }

int run_program(int argc, char** argv) {
  ignore_file_size_limits();
  name_unreadable_files();
  CLI::App program("Trains transformers across many processes.", "tessera");
  program.set_version_flag("--version", version_line());
  program.set_help_all_flag("--help-all", "Help of every command");
  program.require_subcommand(0, 1);
  add_train(program, argc, argv);
  add_eval(program, argc, argv);
  add_generate(program, argc, argv);
  add_tokenize(program);
  add_convert(program);
  add_inspect(program);
  add_completion(program);
  add_report(program);
  add_schema(program);
  add_verify(program);
  add_bench(program, argc, argv);
  add_launch(program);
  add_plan(program);
  program.footer(
      "Examples:\n"
      "  tessera train run.json --nproc 2\n"
      "  tessera generate --model runs/NAME --prompt 'In the beginning'");

  const std::string first_word = argc > 1 ? argv[1] : "";
  try {
    if (argc == 1) {
      std::cerr << program.help();
      return static_cast<int>(ExitCode::kUsage);
    }
    if (first_word == "help") {
      const std::string command = argc > 2 ? argv[2] : "";
      if (!command.empty() && !is_command(program, command)) {
        return usage_error(program, "there is no command " + command, command);
      }
      program.parse(words_of_help(argc, argv));
    } else {
      program.parse(argc, argv);
    }
    return written(exit_code);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help
      return written(program.exit(error));
    }
    return usage_error(program, error.what(), first_word);
  } catch (const std::exception& error) {
    return failed(words_for(error), exit_code_of(error));
  }
}

}  // namespace tessera::cli

namespace {

// LibTorch takes 0.1 s of a core to give back what it registered when it was
// loaded, memory that ends with the process. Handlers that were registered
// since main() began have run by then; those of libraries, as of a profiler, do
// not.
void leave_libraries_as_they_are() {
#if !TS_SANITIZED && defined(__GLIBC__)
  ::on_exit(
      [](int code, void* /*none*/) {
        std::cout.flush();
        std::fflush(nullptr);
        ::_exit(code);
      },
      nullptr);
#endif
}

// Else a file that is opened next would be one of them, and be written to as
// such.
void open_standard_files() {
  for (const int number : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(number, F_GETFD) != -1) continue;
    if (::open("/dev/null", O_RDWR) != number) ::_exit(EXIT_FAILURE);
  }
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_files();
  leave_libraries_as_they_are();
  tessera::cli::begin_to_throw_out_of_memory();
  return tessera::cli::run_program(argc, argv);
}
