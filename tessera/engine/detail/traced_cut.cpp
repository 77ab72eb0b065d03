#include "tessera/engine/detail/traced_cut.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include "tessera/core/config_changes.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/engine/detail/cut_costs.h"
#include "tessera/engine/measured_speeds.h"
#include "tessera/engine/traced_steps.h"
#include "tessera/monitor/report/run_trace.h"

namespace tessera::engine::detail {

using program::Op;

namespace {

constexpr double kYear = 365.0 * 24 * 3600;  // in seconds; none takes as long

// What the times of units hang on, beside the processor.
bool decides_times(const std::string& key) {
  return (key.starts_with("model.") && key != "model.from" &&
          key != "model.lora.from") ||
         key.starts_with("recompute.") || key == "data.seq_len";
}

// What the file says that a run left, as pipeline.cut's fault, whose value led
// to it: nothing of it is the user's to change.
RunConfig config_of_traced(const std::string& run) {
  const auto path = std::filesystem::path(run) / "config.json";
  TS_CHECK_CONFIG(std::filesystem::exists(path), "pipeline.cut is \"", run,
                  "\", a folder without config.json, which every run has. "
                  "Trace a run again, or use facts.");
  try {
    return saved_run_config(tessera::detail::read_json_text(path), path);
  } catch (const Error& error) {
    throw Error(
        error.exit_code(),
        c10::str("pipeline.cut is \"", run,
                 "\", whose configuration cannot be used: ", message_of(error),
                 " Trace a run again, or use facts."));
  }
}

// That what units took there says what they will take here.
void check_traced(const RunConfig& config) {
  const std::string& run = config.pipeline.cut;
  TS_CHECK_CONFIG(config.recompute.mode != "minimal", "pipeline.cut is \"", run,
                  "\", a run's folder, but with recompute.mode minimal how "
                  "often a unit is computed again hangs on the cut itself. Use "
                  "facts.");
  const RunConfig traced = config_of_traced(run);
  const auto changes = tessera::config::changes_in(
      to_json(traced), to_json(config), decides_times);
  TS_CHECK_CONFIG(changes.empty(), "pipeline.cut is \"", run,
                  "\", a run of another model: ", c10::Join("; ", changes),
                  ". Trace a run of this model, or use facts.");
  TS_CHECK_CONFIG(!traced.mesh.star(), "pipeline.cut is \"", run,
                  "\", a run with mesh.data_parallel dp, whose steps are not "
                  "traced by units. Trace one with ddp, or use facts.");
  const bool by_speed =
      traced.mesh.uneven() && data_parallel_degree(traced) > 1;
  TS_CHECK_CONFIG(!by_speed && !has_uneven_batch(traced), "pipeline.cut is \"",
                  run,
                  "\", a run whose data-parallel ranks had different numbers "
                  "of samples, by ",
                  by_speed ? "mesh.speeds" : "batch.uneven",
                  ". Trace one without, or use facts.");
}

// Of one rank.
std::vector<double> seconds_of(
    const RunConfig& config,
    const std::vector<monitor::report::TracedStep>& steps) {
  const int64_t units = config.model.num_blocks() + 2;
  std::vector<double> seconds(units, 0), forwards(units, 0);
  for (const auto& step : steps) {
    for (const auto& span : step.spans) {
      const auto each = instruction_of(span);
      if (!each) continue;
      const bool is_loss = each->op == Op::kLoss;
      if (!is_loss && !program::is_compute(each->op)) continue;
      const int64_t unit = is_loss ? units - 1 : each->unit;
      const double taken_s = span.end_s - span.begin_s;
      TS_CHECK_CONFIG(
          unit >= 0 && unit < units && taken_s >= 0 && taken_s < kYear,
          "pipeline.cut is \"", config.pipeline.cut, "\", whose trace has \"",
          span.name, "\" of unit ", unit, " that took ", taken_s,
          " s. A unit is a number from 0 to ", units - 1,
          ": trace the run again.");
      seconds[unit] += taken_s;
      if (each->op == Op::kForward) forwards[unit] += 1;
    }
  }
  for (int64_t unit = 0; unit < units; ++unit) {
    seconds[unit] /= std::max(1.0, forwards[unit]);
  }
  return with_head(std::move(seconds), config.model.layers);
}

bool can_be_read(const std::filesystem::path& folder) {
  std::error_code error;
  const std::filesystem::directory_iterator files(folder, error);
  return !error && std::ranges::all_of(files, [](const auto& file) {
    return file.is_regular_file() && std::ifstream(file.path()).good();
  });
}

TracedRanks read_traced(const RunConfig& config) {
  const std::string& run = config.pipeline.cut;
  const auto meant = config::nearest(run, {"layers", "facts"});
  TS_CHECK_CONFIG(
      std::filesystem::exists(std::filesystem::path(run) / "trace"),
      "pipeline.cut is \"", run,
      "\": it is neither layers nor facts, nor the folder of a run whose steps "
      "were traced (monitor.trace)",
      meant ? ". Did you mean \"" + *meant + "\"?" : ".");
  try {
    return monitor::report::read_trace(run);
  } catch (const Error& error) {
    // What cannot be read is no wrong input.
    const bool is_read = can_be_read(std::filesystem::path(run) / "trace");
    throw Error(is_read ? ExitCode::kConfig : error.exit_code(),
                c10::str("pipeline.cut is \"", run, "\": ", message_of(error)));
  }
}

}  // namespace

UnitSeconds seconds_of_run(const RunConfig& config, int64_t world_size) {
  const TracedRanks ranks = read_traced(config);
  check_traced(config);
  const bool is_same = std::ssize(ranks) == world_size;
  TS_CHECK_CONFIG(is_same || !config.mesh.uneven(), "pipeline.cut is \"",
                  config.pipeline.cut, "\", a run of ", ranks.size(),
                  " ranks, but mesh.speeds is of ", world_size,
                  ": what its ranks took cannot be told from how fast they "
                  "are. Trace a run on this mesh, or use facts.");
  UnitSeconds seconds;
  for (const auto& steps : ranks) seconds.push_back(seconds_of(config, steps));
  return seconds;
}

std::vector<double> means_of_alike(const RunConfig& config,
                                   const std::vector<double>& operations,
                                   const UnitSeconds& seconds,
                                   const std::vector<double>& speeds) {
  std::map<double, std::pair<double, double>> sums;  // and counts
  for (size_t rank = 0; rank < seconds.size(); ++rank) {
    for (size_t unit = 0; unit < operations.size(); ++unit) {
      if (seconds[rank][unit] == 0) continue;
      auto& [sum, count] = sums[operations[unit]];
      sum += seconds[rank][unit] * (speeds.empty() ? 1 : speeds.at(rank));
      count += 1;
    }
  }
  std::vector<double> means;
  for (const double each : operations) {
    const auto found = sums.find(each);
    TS_CHECK_CONFIG(found != sums.end(), "pipeline.cut is \"",
                    config.pipeline.cut,
                    "\", whose trace has no span of some of the model's units: "
                    "trace the run again.");
    means.push_back(found->second.first / found->second.second);
  }
  return means;
}

std::vector<double> speeds_seen(const UnitSeconds& seconds,
                                const std::vector<double>& means) {
  std::vector<double> rates;
  for (const auto& own : seconds) {
    double taken = 0, expected = 0;
    for (size_t unit = 1; unit + 1 < means.size(); ++unit) {
      if (own[unit] == 0) continue;
      taken += own[unit];
      expected += means[unit];
    }
    rates.push_back(taken > 0 ? expected / taken : 0);
  }
  const double fastest = std::ranges::max(rates);
  std::ranges::replace(rates, 0.0, fastest);
  return rounded_speeds(rates);
}

}  // namespace tessera::engine::detail
