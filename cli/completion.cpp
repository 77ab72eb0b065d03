// tessera completion: what a shell needs to complete commands, flags and keys.
#include <iostream>

#include "cli/commands.h"
#include "cli/completion_scripts.h"

namespace tessera::cli {

void add_completion(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "completion", "What a shell needs to complete commands, flags and keys");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer(
      "Examples:\n"
      "  source <(tessera completion bash)   # in ~/.bashrc\n"
      "  source <(tessera completion zsh)    # in ~/.zshrc\n"
      "  tessera completion fish > ~/.config/fish/completions/tessera.fish");
  command->callback([&program, shell] {
    const auto commands = offered_commands(program);
    std::cout << (*shell == "bash"  ? bash_completion(commands)
                  : *shell == "zsh" ? zsh_completion(commands)
                                    : fish_completion(commands));
  });
}

}  // namespace tessera::cli
