#include "cli/inspect_runs.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <map>

#include "cli/commands.h"
#include "cli/parameter_words.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/engine/run_config.h"
#include "tessera/monitor/json_lines.h"
#include "tessera/monitor/report/run_history.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using detail::Json;

std::string time_of(const fs::path& path) {
  const auto written =
      std::chrono::file_clock::to_sys(fs::last_write_time(path));
  const std::time_t seconds = std::chrono::system_clock::to_time_t(
      std::chrono::time_point_cast<std::chrono::system_clock::duration>(
          written));
  std::tm parts{};
  localtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

Json parsed(const fs::path& path) {
  return detail::parse_json(detail::read_json_text(path), path.string());
}

Json last_step_of(const fs::path& run) {
  const std::string metrics = (run / "metrics.jsonl").string();
  const std::string last = monitor::last_line_of(metrics);
  if (last.empty()) return {};
  try {
    return detail::parse_json(last, metrics);
  } catch (const Error&) {
    // Which line it is takes the whole file to tell: only for the message.
    int64_t number = 0;
    monitor::for_each_line(metrics,
                           [&](const std::string&) { return ++number > 0; });
    return detail::parse_json(last, c10::str(metrics, ": line ", number));
  }
}

engine::RunConfig config_of(const fs::path& run) {
  const fs::path config = run / "config.json";
  return engine::saved_run_config(detail::read_json_text(config),
                                  config.string());
}

// The name in the file DIR/best, or "".
std::string best_of(const fs::path& checkpoints) {
  std::ifstream file(checkpoints / "best");
  std::string name;
  std::getline(file, name);
  return name;
}

// Losses by step, for steps that have a checkpoint.
void add_losses(const fs::path& run, Json& rows) {
  std::map<int64_t, Json*> by_step;
  for (Json& row : rows) by_step[row["step"].get<int64_t>()] = &row;
  const std::string metrics = (run / "metrics.jsonl").string();
  int64_t number = 0;
  monitor::for_each_line(metrics, [&](const std::string& line) {
    const std::string where = c10::str(metrics, ": line ", ++number);
    const Json figures = detail::parse_json(line, where);
    detail::reading(where, [&] {
      const auto found = by_step.find(figures.value("step", int64_t{-1}));
      if (found == by_step.end()) return;
      (*found->second)["loss"] = figures.value("loss", Json());
      if (figures.contains("valid_loss")) {
        (*found->second)["valid_loss"] = figures["valid_loss"];
      }
    });
    return true;
  });
}

// Of all starts; null where there is none.
Json best_valid_loss_in(const std::string& metrics) {
  Json best;
  monitor::for_each_line(metrics, [&](const std::string& line) {
    if (line.find("\"valid_loss\":") == std::string::npos) return true;
    const Json loss = detail::parse_json(line, metrics).at("valid_loss");
    if (loss.is_number() && (best.is_null() || loss < best)) best = loss;
    return true;
  });
  return best;
}

Json row_from(const fs::path& run) {
  Json row = {{"name", run.filename().string()}};
  const Json config = parsed(run / "config.json");
  const Json none = Json::object();
  row["model"] = config.value("model", none).value("family", "");
  const Json last = last_step_of(run);
  row["step"] = last.is_null() ? Json(0) : last.value("step", Json());
  row["of"] = config.value("run", none).value("steps", Json());
  row["loss"] = last.is_null() ? Json() : last.value("loss", Json());
  const fs::path metrics = run / "metrics.jsonl",
                 summary = run / "summary.json";
  row["best_valid_loss"] = best_valid_loss_in(metrics.string());
  row["state"] = "running, or killed";
  if (fs::exists(summary) && monitor::report::has_ended(run)) {
    row["state"] = parsed(summary).value("reason", Json());
  }
  row["written"] = time_of(fs::exists(metrics) ? metrics : run / "config.json");
  return row;
}

Json row_of(const fs::path& run) {
  return detail::reading(run.string(), [&] { return row_from(run); });
}

}  // namespace

bool is_run(const fs::path& path) {
  return fs::exists(path / "config.json") && fs::exists(path / "logs");
}

Json describe_checkpoints(const fs::path& folder, const Verify& verify) {
  Json rows = Json::array();
  const std::string best = best_of(folder);
  for (const auto& found : checkpoint::list_checkpoints(folder.string())) {
    const std::string name = "step-" + std::to_string(found.step);
    const fs::path path = folder / name;
    Json row = {{"name", name}, {"step", found.step}};
    if (found.complaint.empty()) {
      row["bytes"] = checkpoint::read_manifest(path.string()).bytes();
      row["written"] = time_of(path / checkpoint::kManifestName);
      row["state"] = verify ? verify(path.string())
                            : std::string("not verified (use --verify)");
    } else {
      row["state"] = found.complaint;
      if (verify) set_exit_code(static_cast<int>(ExitCode::kInputOutput));
    }
    if (name == best) row["best"] = "best";
    rows.push_back(row);
  }
  return rows;
}

Json describe_run(const fs::path& path, const Verify& verify) {
  const engine::RunConfig config = config_of(path);
  Json json = {{"kind", "run"}};
  json["name"] = config.run.name;
  json["model"] = config.model.family;
  add_parameters(json, [&] { return config.model; });
  json["steps"] = config.run.steps;
  const Json last = last_step_of(path);
  json["last step"] = last.is_null() ? Json("none yet") : last;
  if (fs::exists(path / "summary.json")) {
    json["summary"] = parsed(path / "summary.json");
  }
  const fs::path folder = config.checkpoint.dir.empty()
                              ? path / "checkpoints"
                              : fs::path(config.checkpoint.dir);
  Json checkpoints = describe_checkpoints(folder, verify);
  add_losses(path, checkpoints);
  json["checkpoints"] = checkpoints;
  return json;
}

Json describe_runs(const fs::path& folder) {
  std::vector<Json> rows;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!entry.is_directory() || !is_run(entry.path())) continue;
    try {
      rows.push_back(row_of(entry.path()));
    } catch (const std::exception& error) {  // one folder is not all
      rows.push_back({{"name", entry.path().filename().string()},
                      {"model", nullptr},
                      {"step", nullptr},
                      {"of", nullptr},
                      {"loss", nullptr},
                      {"best_valid_loss", nullptr},
                      {"state", message_of(error)},
                      {"written", time_of(entry.path())}});
    }
  }
  std::ranges::sort(rows, [](const Json& a, const Json& b) {
    return a["written"] > b["written"];
  });
  return rows;
}

}  // namespace tessera::cli
