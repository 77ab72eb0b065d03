#include "cli/man_page.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <sstream>

#include "tessera/core/error.h"
#include "tessera/core/version.h"

namespace tessera::cli {
namespace {

// Text as roff prints it unchanged: hyphens that can be copied, no requests.
std::string plain(const std::string& text) {
  std::string roff;
  bool line_begins = true;
  for (const char c : text) {
    if (line_begins && (c == '.' || c == '\'')) roff += "\\&";
    switch (c) {
      case '\\':
        roff += "\\e";
        break;
      case '-':
        roff += "\\-";
        break;
      case '\'':
        roff += "\\(aq";
        break;
      case '`':
        roff += "\\(ga";
        break;
      case '^':
        roff += "\\(ha";
        break;
      case '~':
        roff += "\\(ti";
        break;
      default:
        roff += c;
    }
    line_begins = c == '\n';
  }
  return roff;
}

std::string bold(const std::string& text) {
  return "\\fB" + plain(text) + "\\fR";
}

// An argument of a request.
std::string quoted(const std::string& text) {
  std::string inside = plain(text);
  for (size_t at = 0; (at = inside.find('"', at)) != std::string::npos;) {
    inside.replace(at, 1, "\\(dq");
  }
  return '"' + inside + '"';
}

// "Train a model" as the sentence that it is.
std::string sentence(const std::string& text) {
  if (text.empty()) return text;
  std::string words = text;
  words[0] =
      static_cast<char>(std::toupper(static_cast<unsigned char>(words[0])));
  return plain(words) + (words.back() == '.' ? "\n" : ".\n");
}

bool is_help(const CLI::App& command, const CLI::Option* option) {
  return option == command.get_help_ptr() ||
         option == command.get_help_all_ptr();
}

void write_option(const CLI::Option& option, std::ostream& page) {
  const bool positional = !option.nonpositional();
  page << ".TP\n"
       << bold(option.get_name(positional, !positional))
       << plain(CLI::Formatter().make_option_opts(&option)) << "\n"
       << plain(option.get_description()) << "\n";
}

void write_footer(const std::string& footer, std::ostream& page) {
  if (!footer.empty()) page << ".PP\n.nf\n" << plain(footer) << "\n.fi\n";
}

// `path` is the command as it is typed. A group of flags has no name.
void write_command(const CLI::App& command, const std::string& path,
                   std::ostream& page) {
  if (!command.get_name().empty()) {
    page << ".SS " << quoted(path) << "\n"
         << sentence(command.get_description());
  }
  const auto below = command.get_subcommands(nullptr);
  for (const CLI::App* group : below) {
    if (group->get_name().empty()) write_command(*group, path, page);
  }
  for (const CLI::Option* option : command.get_options()) {
    if (!is_help(command, option)) write_option(*option, page);
  }
  write_footer(command.get_footer(), page);
  for (const CLI::App* named : below) {
    if (named->get_name().empty()) continue;
    write_command(*named, path + " " + named->get_name(), page);
  }
}

void write_keys(const std::vector<config::Entry>& keys, std::ostream& page) {
  page
      << ".SH CONFIGURATION\n"
         "A run is described by a file of JSON, in which // begins a comment.\n"
         "Every key of it is a flag too of the commands that read it, as in\n"
      << bold("--batch.global=64") << ".\n";
  for (const auto& entry : keys) {
    if (entry.default_value.empty()) {
      page << ".SS " << quoted(entry.name) << "\n" << sentence(entry.meaning);
      continue;
    }
    page << ".TP\n"
         << bold(entry.name) << " = " << plain(entry.default_value) << "\n"
         << plain(entry.meaning);
    if (!entry.rules.empty()) page << " (" << plain(entry.rules) << ")";
    page << "\n";
  }
}

void write_exit_codes(std::ostream& page) {
  constexpr std::array kCodes = {
      std::pair{ExitCode::kOk, "done"},
      std::pair{ExitCode::kFailed, "the run failed"},
      std::pair{ExitCode::kUsage, "the command line is wrong"},
      std::pair{ExitCode::kUnreachable,
                "a peer or the rendezvous cannot be reached"},
      std::pair{ExitCode::kInputOutput,
                "a file is missing, wrong or could not be written"},
      std::pair{
          ExitCode::kStopped,
          "stopped by a signal, after writing a checkpoint to go on from"},
      std::pair{ExitCode::kConfig, "the configuration is wrong"}};
  page << ".SH EXIT STATUS\n";
  for (const auto& [code, meaning] : kCodes) {
    page << ".TP\n.B " << static_cast<int>(code) << "\n" << meaning << "\n";
  }
}

}  // namespace

std::string man_page(const CLI::App& program,
                     const std::vector<config::Entry>& keys) {
  std::ostringstream page;
  std::string purpose = program.get_description();
  purpose[0] =
      static_cast<char>(std::tolower(static_cast<unsigned char>(purpose[0])));
  if (purpose.back() == '.') purpose.pop_back();
  page << ".\\\" Made by tessera schema --man.\n"
          ".TH TESSERA 1 \"\" "
       << quoted(std::string("tessera ") + kVersion) << " \"User Commands\"\n"
       << ".SH NAME\ntessera \\- " << plain(purpose) << "\n"
       << ".SH SYNOPSIS\n.B tessera\n.I COMMAND\n[\\fIFLAG\\fR ...]\n"
       << ".SH OPTIONS\nEvery command takes the first two.\n";
  for (const CLI::Option* option :
       {program.get_help_ptr(), program.get_help_all_ptr(),
        program.get_option("--version")}) {
    write_option(*option, page);
  }
  page << ".SH COMMANDS\n";
  for (const CLI::App* command : program.get_subcommands(nullptr)) {
    if (command->get_group().empty()) continue;  // it is hidden
    write_command(*command, "tessera " + command->get_name(), page);
  }
  write_keys(keys, page);
  write_exit_codes(page);
  // Its first line is the title that the section has.
  const std::string examples = program.get_footer();
  page << ".SH EXAMPLES\n.nf\n"
       << plain(examples.substr(examples.find('\n') + 1)) << "\n.fi\n";
  return page.str();
}

}  // namespace tessera::cli
