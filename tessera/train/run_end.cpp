#include "tessera/train/run_end.h"

#include <algorithm>
#include <exception>
#include <string>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/monitor/json_lines.h"
#include "tessera/monitor/step_record.h"
#include "tessera/train/run_folder.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using tessera::detail::Json;

// The keys of monitor::Summary's, of which something is known.
void write(const engine::RunConfig& config, int64_t world_size, int64_t step,
           const monitor::RunEnd& end) {
  const Json json = {{"name", config.run.name},        {"reason", end.reason},
                     {"exit_code", end.exit_code},     {"message", end.message},
                     {"world_size", world_size},       {"steps", step},
                     {"total_steps", config.run.steps}};
  write_file_atomic(RunFolder(config).path() + "/summary.json",
                    json.dump() + "\n");
}

int64_t last_step_in(const std::string& metrics) {
  const std::string last = monitor::last_line_of(metrics);
  if (last.empty()) return 0;
  return tessera::detail::reading(metrics, [&] {
    return tessera::detail::parse_json(last, metrics).at("step").get<int64_t>();
  });
}

void complete_summary(const engine::RunConfig& config, int64_t world_size,
                      const Ending& ending) {
  constexpr ExitCode kKnown[] = {ExitCode::kOk, ExitCode::kUsage,
                                 ExitCode::kStopped, ExitCode::kConfig};
  const bool is_known = std::ranges::any_of(kKnown, [&](ExitCode each) {
    return ending.exit_code == static_cast<int>(each);
  });
  const std::string folder = RunFolder(config).path();
  const std::string metrics = folder + "/metrics.jsonl";
  const std::string summary = folder + "/summary.json";
  if (is_known || !fs::exists(metrics)) return;
  if (!fs::exists(summary)) {
    write(config, world_size, last_step_in(metrics),
          {.reason = "failed",
           .exit_code = ending.exit_code,
           .message = ending.message});
    return;
  }
  if (fs::last_write_time(summary) < ending.started) return;
  const Json told = tessera::detail::parse_json(read_file(summary), summary);
  if (told.value("reason", "") != "failed") return;
  Json all = told;
  all["exit_code"] = ending.exit_code;
  if (all != told) write_file_atomic(summary, all.dump() + "\n");
}

}  // namespace

void note_end(const engine::RunConfig& config, int64_t world_size,
              const Ending& ending) {
  try {
    complete_summary(config, world_size, ending);
  } catch (const std::exception& error) {
    log::warning("the end of the run was not recorded: ", message_of(error));
  }
}

void note_nothing_to_do(const engine::RunConfig& config, int64_t world_size,
                        int64_t step) {
  if (fs::exists(RunFolder(config).path() + "/summary.json")) return;
  write(config, world_size, step, {});
}

}  // namespace tessera::train
