#include "tessera/engine/model_cut.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <utility>

#include "tessera/core/config_changes.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/engine/measured_speeds.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/traced_steps.h"
#include "tessera/monitor/report/run_trace.h"
#include "tessera/parallel/pipeline/cut.h"
#include "tessera/parallel/pipeline/stages.h"

namespace tessera::engine {

namespace pipeline = parallel::pipeline;
using mesh::Axis;
using pipeline::UnitCosts;
using program::Op;

namespace {

constexpr double kYear = 365.0 * 24 * 3600;  // in seconds; none takes as long

void check_speeds(const RunConfig& config, const mesh::DeviceMesh& mesh) {
  const auto& speeds = config.mesh.speeds;
  TS_CHECK_CONFIG(
      !config.mesh.star() || (speeds.empty() && !config.mesh.measure_speeds),
      speeds.empty() ? "mesh.measure_speeds is true" : "mesh.speeds is set",
      ", but with mesh.data_parallel dp devices are threads of one "
      "process, whose shares are even. Leave it out, or use "
      "mesh.data_parallel ddp.");
  TS_CHECK_CONFIG(speeds.empty() || std::ssize(speeds) == mesh.world_size(),
                  "mesh.speeds has ", speeds.size(),
                  " numbers, but the world has ", mesh.world_size(),
                  mesh.world_size() == 1 ? " rank" : " ranks",
                  ": it has one for each. Give ", mesh.world_size(),
                  ", or leave it out where all are alike.");
}

// By stage, and by data-parallel rank and stage: of the slowest rank there.
class Speeds {
 public:
  Speeds(const std::vector<double>& of_ranks, const mesh::DeviceMesh& mesh)
      : stages_(mesh.degree(Axis::kPp)),
        at_(mesh.degree(Axis::kDpReplicate) * mesh.degree(Axis::kDpShard),
            std::vector<double>(stages_, INFINITY)) {
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      const mesh::Coord coord = mesh.coord_of(static_cast<int64_t>(rank));
      double& slowest = at_.at(mesh.data_rank_of(coord)).at(coord[Axis::kPp]);
      slowest = std::min(slowest, of_ranks[rank]);
    }
  }

  std::vector<double> of_stages() const {
    std::vector<double> slowest(stages_, INFINITY);
    for (const auto& column : at_) {
      for (int64_t stage = 0; stage < stages_; ++stage) {
        slowest[stage] = std::min(slowest[stage], column[stage]);
      }
    }
    return slowest;
  }

  // With so much to do in each stage.
  std::vector<double> of_data_ranks(const std::vector<double>& loads) const {
    std::vector<double> speeds;
    for (const auto& column : at_) {
      double slowest = INFINITY;
      for (int64_t stage = 0; stage < stages_; ++stage) {
        slowest = std::min(slowest, column[stage] / loads.at(stage));
      }
      speeds.push_back(slowest);
    }
    return speeds;
  }

 private:
  int64_t stages_;
  std::vector<std::vector<double>> at_;
};

// Every layer costs the same, and what else there is nothing.
UnitCosts costs_by_layers(int64_t layers) {
  UnitCosts costs{.time = std::vector<double>(layers + 2, 1.0)};
  costs.time.front() = costs.time.back() = 0;
  return costs;
}

double flops_of(const program::UnitFacts& unit) {
  return static_cast<double>(unit.forward.total() +
                             unit.backward_input.total() +
                             unit.backward_weight.total());
}

// What the configuration has computed again of a unit once a micro-batch, which
// every stage does of all its units, or of each k-th block.
double again_of(const RunConfig& config, const program::UnitFacts& of,
                int64_t unit) {
  const std::string& mode = config.recompute.mode;
  const bool is_block = unit > 0 && unit <= config.model.num_blocks();
  const bool again =
      mode == "stage" || (mode == "selective" && is_block) ||
      (mode == "block" && is_block && config.recompute.covers(unit - 1));
  return again ? static_cast<double>(of.again.flops.total()) : 0;
}

// By embedding, layer and head, of numbers by unit: what predicts further ahead
// goes with the head.
std::vector<double> with_head(std::vector<double> by_unit, int64_t layers) {
  const auto ahead = by_unit.begin() + layers + 1;
  by_unit.back() = std::accumulate(ahead, by_unit.end(), 0.0);
  by_unit.erase(ahead, by_unit.end() - 1);
  return by_unit;
}

// Of the parameters that units compute with.
std::vector<double> state_bytes_of(const RunConfig& config,
                                   const program::Facts& facts) {
  std::vector<double> bytes;
  for (int64_t unit = 0; unit < config.model.num_blocks() + 2; ++unit) {
    bytes.push_back(static_cast<double>(facts.units.at(unit).state_bytes()));
  }
  bytes = with_head(std::move(bytes), config.model.layers);
  for (const auto& each : facts.units.front().parameters) {
    if (each.tied) bytes.back() += static_cast<double>(each.state_bytes());
  }
  return bytes;
}

// Operations, and bytes: of parameters, in as many versions as a stage holds,
// and of what a unit keeps for its backward.
UnitCosts costs_by_facts(const RunConfig& config,
                         const mesh::DeviceMesh& mesh) {
  mesh::Coord coord = mesh.coord_of(0);
  const auto facts = facts_of(config, mesh, coord);
  UnitCosts costs;
  for (int64_t unit = 0; unit < config.model.num_blocks() + 2; ++unit) {
    const program::UnitFacts& of = facts.units.at(unit);
    costs.time.push_back(flops_of(of) + again_of(config, of, unit));
    if (config.recompute.mode == "minimal") {
      costs.replay.push_back(static_cast<double>(of.forward.total()));
    }
    costs.kept_bytes.push_back(static_cast<double>(of.kept_bytes));
  }
  for (auto* each : {&costs.time, &costs.replay, &costs.kept_bytes}) {
    if (!each->empty()) *each = with_head(*each, config.model.layers);
  }
  costs.time.back() += flops_of(facts.loss);
  costs.state_bytes = state_bytes_of(config, facts);
  if (config.pipeline.delayed() && mesh.degree(Axis::kPp) > 1) {
    coord[Axis::kPp] = 1;
    costs.later_state_bytes =
        state_bytes_of(config, facts_of(config, mesh, coord));
  }
  return costs;
}

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
    return run_config_from_text(tessera::detail::read_json_text(path), path);
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

// What a rank was seen to take for a micro-batch, by unit; 0: never seen.
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

// What a model is cut by.
struct CutCosts {
  UnitCosts units;
  std::vector<double> speeds = {};  // of ranks; none: all alike
};

using UnitSeconds = std::vector<std::vector<double>>;  // by rank and unit

// Units of as many operations are alike: each takes what all of them take on
// average, over the ranks that were seen to run one, at speed 1.
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

// By layers, which ranks have alike: the mean of those that a rank ran over
// what it took. Of a rank without layers nothing is known: it counts as fast.
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

CutCosts costs_by_run(const RunConfig& config, const mesh::DeviceMesh& mesh) {
  const auto ranks = read_traced(config);
  check_traced(config);
  const bool same_world = std::ssize(ranks) == mesh.world_size();
  TS_CHECK_CONFIG(same_world || !config.mesh.uneven(), "pipeline.cut is \"",
                  config.pipeline.cut, "\", a run of ", ranks.size(),
                  " ranks, but mesh.speeds is of ", mesh.world_size(),
                  ": what its ranks took cannot be told from how fast they "
                  "are. Trace a run on this mesh, or use facts.");
  UnitSeconds seconds;
  for (const auto& steps : ranks) seconds.push_back(seconds_of(config, steps));
  CutCosts costs{.units = costs_by_facts(config, mesh),
                 .speeds = config.mesh.speeds};
  const auto operations = costs.units.time;
  if (same_world && costs.speeds.empty()) {
    costs.speeds =
        speeds_seen(seconds, means_of_alike(config, operations, seconds, {}));
  }
  costs.units.time =
      means_of_alike(config, operations, seconds,
                     same_world ? costs.speeds : std::vector<double>{});
  return costs;
}

// By pipeline.cut, with the speeds by which layers move.
CutCosts costs_of(const RunConfig& config, const mesh::DeviceMesh& mesh) {
  if (config.pipeline.cuts_by_run()) return costs_by_run(config, mesh);
  return {.units = config.pipeline.cut == "facts"
                       ? costs_by_facts(config, mesh)
                       : costs_by_layers(config.model.layers),
          .speeds = config.mesh.speeds};
}

void choose_split(RunConfig& config, const mesh::DeviceMesh& mesh,
                  const CutCosts& by) {
  auto& of = config.pipeline;
  pipeline::CutRules rules{.pipeline = of.pipeline(mesh.degree(Axis::kPp)),
                           .bare_ends = of.cut != "layers"};
  if (!by.speeds.empty()) {
    rules.speeds = Speeds(by.speeds, mesh).of_stages();
  }
  if (of.cut == "layers" && !mesh::differ(rules.speeds)) return;  // evenly
  of.split = pipeline::balanced_split(by.units, rules);
  of.is_split_chosen = true;
  if (!of.cuts_by_run()) return;
  of.seconds_seen = by.units.time;
  if (config.mesh.speeds.empty()) of.speeds_seen = by.speeds;
}

std::vector<int64_t> layers_of_parts(const RunConfig& config) {
  const auto& of = config.pipeline;
  const auto runs = pipeline::units_of_runs(
      config.model.layers, of.pipeline(config.mesh.pp).num_runs(), of);
  std::vector<int64_t> layers;
  for (const auto& run : runs) layers.push_back(std::ssize(run));
  --layers.front();
  --layers.back();
  return layers;
}

// Of data-parallel ranks.
std::vector<double> speeds_with(const RunConfig& config,
                                const mesh::DeviceMesh& mesh,
                                const UnitCosts& costs) {
  const auto loads = pipeline::loads_of(
      costs, config.pipeline.pipeline(mesh.degree(Axis::kPp)),
      layers_of_parts(config));
  return Speeds(config.mesh.speeds, mesh).of_data_ranks(loads);
}

// `speeds`: of data-parallel ranks; none: all alike.
void choose_rows(RunConfig& config, std::vector<double> speeds) {
  if (speeds.empty() && !has_uneven_batch(config)) return;
  if (speeds.empty()) speeds.assign(data_parallel_degree(config), 1);
  auto rows = shares_by_speed(samples_of_microbatch(config), speeds);
  const bool is_even = std::ranges::all_of(
      rows, [&](int64_t each) { return each == config.batch.micro; });
  if (!is_even) config.batch.rows = std::move(rows);
}

}  // namespace

void share_out(RunConfig& config, const mesh::DeviceMesh& mesh) {
  check_speeds(config, mesh);
  config.batch.rows.clear();
  const bool cuts = mesh.degree(Axis::kPp) > 1 && config.pipeline.split.empty();
  const bool shares = data_parallel_degree(config) > 1 && config.mesh.uneven();
  const bool is_even = config.pipeline.cut == "layers" && !config.mesh.uneven();
  std::vector<double> speeds;
  if ((cuts || shares) && !is_even) {
    // What no part is chosen by is not asked for: a given split has its layers.
    RunConfig alone = config;
    if (!cuts) alone.pipeline.cut = "layers";
    const CutCosts by = costs_of(alone, mesh);
    if (cuts) choose_split(config, mesh, by);
    if (shares) speeds = speeds_with(config, mesh, by.units);
  }
  choose_rows(config, std::move(speeds));
}

std::vector<int64_t> shares_by_speed(int64_t total,
                                     const std::vector<double>& speeds) {
  const double sum = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  const auto count = std::ssize(speeds);
  TORCH_INTERNAL_ASSERT(total >= count, total, " things for ", count);
  // What everybody has by the time when all but `count` are shared out.
  const double time = static_cast<double>(total - count) / sum;
  std::vector<int64_t> shares;
  for (const double speed : speeds) {
    shares.push_back(
        std::max<int64_t>(1, static_cast<int64_t>(std::floor(time * speed))));
  }
  int64_t left =
      total - std::accumulate(shares.begin(), shares.end(), int64_t{0});
  const auto end_with_one_more = [&](size_t i) {
    return std::pair(static_cast<double>(shares[i] + 1) / speeds[i],
                     -speeds[i]);
  };
  for (; left > 0; --left) {
    size_t next = 0;
    for (size_t i = 1; i < shares.size(); ++i) {
      if (end_with_one_more(i) < end_with_one_more(next)) next = i;
    }
    ++shares[next];
  }
  return shares;
}

std::string cut_text(const RunConfig& config) {
  const auto& of = config.pipeline;
  if (of.is_split_chosen) {
    return c10::str("by ", of.cut,
                    config.mesh.uneven() ? " and mesh.speeds" : "");
  }
  return of.split.empty() ? "evenly" : "as pipeline.split says";
}

std::string split_text(const RunConfig& config) {
  return c10::str("layers ", c10::Join(", ", layers_of_parts(config)), " ",
                  cut_text(config));
}

std::string seen_text(const RunConfig& config) {
  const auto& seconds = config.pipeline.seconds_seen;
  if (seconds.empty()) return "";
  const auto [least, most] =
      std::minmax_element(seconds.begin() + 1, seconds.end() - 1);
  const std::string shortest = seconds_text(*least);
  const std::string longest = seconds_text(*most);
  const auto& speeds = config.pipeline.speeds_seen;
  return c10::str(
      "embedding ", seconds_text(seconds.front()),
      shortest == longest ? c10::str(", a layer ", shortest)
                          : c10::str(", layers ", shortest, " to ", longest),
      ", head ", seconds_text(seconds.back()), " of a micro-batch",
      speeds.empty() ? "" : c10::str("; speeds ", c10::Join(", ", speeds)));
}

std::string rows_text(const RunConfig& config) {
  return config.batch.rows.empty()
             ? std::to_string(config.batch.micro)
             : c10::str(c10::Join(", ", config.batch.rows));
}

std::string shares_text(const RunConfig& config) {
  if (config.batch.rows.empty()) return "";
  std::vector<std::string> reasons;
  if (config.mesh.uneven()) reasons.emplace_back("mesh.speeds");
  if (has_uneven_batch(config)) reasons.emplace_back("batch.uneven");
  return c10::str(rows_text(config),
                  " samples of a micro-batch on the data-parallel ranks, by ",
                  c10::Join(" and ", reasons));
}

namespace {

// Whether a given split is what speeds would lead to, as the config.json of a
// run keeps it. What a traced run says is not asked for again.
bool is_cut_by_speeds(const RunConfig& config) {
  RunConfig anew = config;
  anew.pipeline.split.clear();
  if (config.mesh.pp == 1 || config.pipeline.cuts_by_run()) return false;
  share_out(anew, mesh_of(config, implied_world_size(config)));
  return anew.pipeline.split == config.pipeline.split;
}

}  // namespace

std::vector<std::string> idle_cuts(const RunConfig& config) {
  std::vector<std::string> found;
  const auto& of = config.pipeline;
  const bool is_given = !of.split.empty() && !of.is_split_chosen;
  if (of.cut != "layers" && config.mesh.pp == 1) {
    found.emplace_back("pipeline.cut is not used while mesh.pp is 1");
  } else if (of.cut != "layers" && is_given) {
    found.emplace_back(
        "pipeline.cut is not used: pipeline.split says how many layers each "
        "part has");
  }
  if (config.mesh.measure_speeds) {
    if (is_given && data_parallel_degree(config) == 1) {
      found.emplace_back(
          "mesh.measure_speeds moves no layers: pipeline.split says how many "
          "each part has. Take it out to have them shared out again");
    }
    return found;
  }
  if (config.mesh.speeds.empty()) return found;
  if (!config.mesh.uneven()) {
    found.emplace_back("mesh.speeds changes nothing: all are alike");
  } else if (!of.is_split_chosen && config.batch.rows.empty() &&
             !(is_given && is_cut_by_speeds(config))) {
    found.push_back(c10::str(
        "mesh.speeds changes nothing: ",
        is_given ? "pipeline.split says how many layers each part has, "
        : config.mesh.pp > 1 ? "stages are equally fast, "
                             : "there is one stage, ",
        "and of batch.micro ", config.batch.micro, " x ",
        data_parallel_degree(config),
        " samples each data-parallel rank has as many, one at least"));
  }
  return found;
}

}  // namespace tessera::engine
