// tessera report: one self-contained page on a run, or on several.
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/monitor/report/page.h"

namespace tessera::cli {
namespace {

struct ReportFlags {
  std::vector<std::string> runs;
  std::string out;
};

void run_report(const ReportFlags& flags) {
  std::vector<monitor::report::RunHistory> runs;
  for (const std::string& folder : flags.runs) {
    runs.push_back(monitor::report::read_history(folder));
  }
  std::string out = flags.out;
  if (out.empty()) {
    out = runs.size() == 1
              ? (std::filesystem::path(flags.runs[0]) / "report.html").string()
              : "report.html";
  }
  TS_CHECK_USAGE(!std::filesystem::is_regular_file(out) ||
                     monitor::report::is_page(read_file(out)),
                 "--out ", out,
                 " is there already and is no page of a report; nothing was "
                 "written.");
  write_file_atomic(out, monitor::report::page_of(runs));
  std::cout << out << std::endl;
}

}  // namespace

void add_report(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "report", "Write one page on a run, or on several to compare them");
  auto flags = std::make_shared<ReportFlags>();
  command->add_option("runs", flags->runs, "run folders, RUN_DIR/NAME")
      ->required();
  command
      ->add_option("--out", flags->out,
                   "the page; none: report.html in the run's folder, or "
                   "here where there are several")
      ->check(some_path());
  command->callback([flags] { run_report(*flags); });
}

}  // namespace tessera::cli
