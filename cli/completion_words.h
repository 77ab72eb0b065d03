// What can be typed after the words of a command line, as a shell offers it:
// read from the program's commands and the configuration's schema, so that
// nothing is listed twice.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tessera::cli {

struct OfferedWord {
  std::string text;
  std::string about;
};

// "--dtype", or a key as "--data.train"; what may follow it is one of
// `choices`, or a file, or neither: a number, which no shell knows.
struct OfferedFlag : OfferedWord {
  bool takes_value = false;
  bool takes_file = false;
  std::vector<std::string> choices = {};
};

// A command of which some words are typed.
struct OfferedCommand {
  std::string path;                   // "", " train", " bench comm"
  std::vector<OfferedWord> operands;  // commands below it, or its first word
  bool takes_files = false;           // as words without a flag
  std::vector<OfferedFlag> flags;
  std::vector<OfferedFlag> keys;
};

// The program without a command is the first one.
std::vector<OfferedCommand> offered_commands(const CLI::App& program);

}  // namespace tessera::cli
