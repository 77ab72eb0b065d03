// tessera completion: what a shell needs to complete commands, flags and keys.
#include <iostream>
#include <sstream>

#include "cli/commands.h"
#include "tessera/core/config.h"
#include "tessera/engine/run_config.h"

namespace tessera::cli {
namespace {

using Words = std::vector<std::string>;

void add_flags(const CLI::App& command, Words& words) {
  for (const CLI::Option* option : command.get_options()) {
    for (const auto& name : option->get_lnames()) words.push_back("--" + name);
  }
}

// The commands below a command, its flags, and the keys of a configuration
// where it takes them.
Words words_of(const CLI::App& command) {
  Words words;
  for (const CLI::App* below : command.get_subcommands(nullptr)) {
    if (below->get_name().empty()) {
      add_flags(*below, words);  // a group of flags
    } else {
      words.push_back(below->get_name());
    }
  }
  add_flags(command, words);
  if (!command.get_allow_extras()) return words;
  config::Provenance keys;
  engine::run_config_from_text("{}", "the defaults", {}, &keys);
  for (const auto& [key, origin] : keys) words.push_back("--" + key + "=");
  return words;
}

std::string joined(const Words& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

// A key is completed without a blank behind its '='; what is no word of these
// is a file.
std::string bash(const CLI::App& program) {
  std::ostringstream text;
  text << "_tessera() {\n"
          "  local word=${COMP_LINE:0:COMP_POINT}; word=${word##*[[:space:]]}\n"
          "  local words command=${COMP_WORDS[1]}\n"
          "  [[ $COMP_CWORD -eq 1 ]] && command=\n"
          "  case $command in\n"
          "    '') words='"
       << joined(words_of(program)) << "' ;;\n";
  for (const CLI::App* command : program.get_subcommands(nullptr)) {
    text << "    " << command->get_name() << ") words='"
         << joined(words_of(*command)) << "' ;;\n";
  }
  text << "  esac\n"
          "  if [[ $word == *=* ]]; then\n"
          "    COMPREPLY=($(compgen -f -- \"${word#*=}\"))\n"
          "    return\n"
          "  fi\n"
          "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
          "  [[ ${#COMPREPLY[@]} -eq 0 ]] && COMPREPLY=($(compgen -f -- "
          "\"$word\"))\n"
          "  [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace\n"
          "}\n"
          "complete -o filenames -F _tessera tessera\n";
  return text.str();
}

std::string zsh(const CLI::App& program) {
  return "#compdef tessera\n"
         "autoload -U bashcompinit && bashcompinit\n" +
         bash(program);
}

std::string fish(const CLI::App& program) {
  std::ostringstream text;
  const auto say = [&](const std::string& when, const Words& words) {
    text << "complete -c tessera -n '" << when << "' -a '" << joined(words)
         << "'\n";
  };
  say("__fish_use_subcommand", words_of(program));
  for (const CLI::App* command : program.get_subcommands(nullptr)) {
    say("__fish_seen_subcommand_from " + command->get_name(),
        words_of(*command));
  }
  return text.str();
}

}  // namespace

void add_completion(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "completion", "What a shell needs to complete commands, flags and keys");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer(
      "Examples:\n"
      "  source <(tessera completion bash)\n"
      "  tessera completion fish > ~/.config/fish/completions/tessera.fish");
  command->callback([&program, shell] {
    std::cout << (*shell == "bash"  ? bash(program)
                  : *shell == "zsh" ? zsh(program)
                                    : fish(program));
  });
}

}  // namespace tessera::cli
