#include "cli/plan_drawing.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <iostream>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/engine/bubble_hint.h"
#include "tessera/engine/cut_text.h"
#include "tessera/engine/step_drawing.h"
#include "tessera/engine/step_plan.h"
#include "tessera/mesh/axis.h"
#include "tessera/models/model.h"
#include "tessera/monitor/report/drawing.h"
#include "tessera/monitor/report/run_trace.h"

namespace tessera::cli {
namespace {

namespace report = monitor::report;

// "1,2.5": positive numbers, between `least` and `most` of them.
std::vector<double> numbers_of(const std::string& flag, const std::string& text,
                               size_t least, size_t most) {
  std::vector<double> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    double value = 0;
    const auto found = std::from_chars(at, end, value);
    const bool is_last = found.ptr == end;
    if (found.ec != std::errc() || !(value >= 0) || value > 1e30 ||
        (!is_last && *found.ptr != ',')) {
      numbers.clear();
      break;
    }
    numbers.push_back(value);
    if (is_last) break;
    at = found.ptr + 1;
  }
  TS_CHECK_USAGE(numbers.size() >= least && numbers.size() <= most, flag, " ",
                 text, " is no list of ", least,
                 least == most ? "" : c10::str(" to ", most),
                 " numbers of 0 or more, with commas between them.");
  return numbers;
}

constexpr double kGiga = 1e9;

std::pair<std::string, program::Link> link_of(const std::string& text) {
  const size_t equals = text.find('=');
  const std::string axis =
      equals == std::string::npos ? "" : text.substr(0, equals);
  bool known = axis.empty();
  for (const auto& entry : mesh::kAxisTable) known |= axis == entry.name;
  TS_CHECK_USAGE(known, "--link: there is no axis ", axis, ". Use one of ",
                 mesh::names_of_axes(),
                 ", expert_replicate, expert_dp, ep, etp, or none for all.");
  const auto numbers = numbers_of(
      "--link", equals == std::string::npos ? text : text.substr(equals + 1), 2,
      2);
  TS_CHECK_USAGE(numbers[1] > 0, "--link ", text,
                 ": a link without bandwidth moves nothing.");
  return {axis,
          {.latency = numbers[0] * 1e-6, .bytes_per_time = numbers[1] * kGiga}};
}

engine::PlanCosts costs_of(const DrawFlags& flags,
                           const engine::TracedRanks& traced) {
  engine::PlanCosts costs;
  TS_CHECK_USAGE(flags.times.empty() || flags.device.empty(),
                 "--times and --device both say how long stages take. Use "
                 "one of them.");
  if (!flags.times.empty()) {
    const auto times = numbers_of("--times", flags.times, 3, 4);
    costs.stages = {times[0], times[1], times[2]};
    costs.message = times.size() > 3 ? times[3] : 0;
  }
  if (!flags.device.empty()) {
    const auto rates = numbers_of("--device", flags.device, 1, 2);
    TS_CHECK_USAGE(rates[0] > 0 && rates.back() > 0, "--device ", flags.device,
                   ": a device with a rate of 0 never ends.");
    costs.device = program::Device{.flops = rates[0] * 1e12};
    if (rates.size() > 1) costs.device->memory_bytes = rates[1] * kGiga;
  }
  if (!traced.empty()) costs.traced = &traced;
  const bool in_seconds = costs.device || (!costs.stages && !traced.empty());
  TS_CHECK_USAGE(flags.links.empty() || in_seconds,
                 "--link is in seconds, and what stages take is not. Give a "
                 "--device, or the --trace of a run.");
  for (const auto& each : flags.links) {
    const auto [at, is_new] = costs.links.insert(link_of(each));
    TS_CHECK_USAGE(is_new, "--link ", each, ": this axis has one already (",
                   at->first.empty() ? "that of all" : at->first,
                   "). Leave one of them out.");
  }
  return costs;
}

using detail::Json;

Json json_of(const program::Instruction& each, const program::Timing& at) {
  Json json = {{"op", program::name_of(each.op)}};
  if (each.phase != program::Phase::kWhole) {
    json["phase"] = each.phase == program::Phase::kBegin ? "begin" : "await";
  }
  if (each.microbatch >= 0) json["microbatch"] = each.microbatch;
  if (each.unit >= 0) json["unit"] = each.unit;
  if (each.version > 0) json["version"] = each.version;
  json["chunk"] = each.chunk;
  json["begin"] = at.begin;
  json["end"] = at.end;
  return json;
}

Json json_of(const engine::PlannedStage& stage) {
  Json json = {{"rank", stage.rank},
               {"ranks", stage.num_ranks},
               {"work", stage.times.work},
               {"bubble", stage.times.bubble},
               {"exposed_communication", stage.times.exposed},
               {"waits_for_files", stage.times.files},
               {"state_bytes", stage.state_bytes},
               {"peak_bytes", stage.peak_bytes}};
  Json& instructions = json["instructions"] = Json::array();
  for (size_t i = 0; i < stage.program.size(); ++i) {
    instructions.push_back(json_of(stage.program[i], stage.times.at[i]));
  }
  Json& bytes = json["bytes_over_time"] = Json::array();
  for (const auto& level : program::levels_of(stage.times, stage.memory)) {
    bytes.push_back({level.time, level.bytes + stage.state_bytes});
  }
  return json;
}

Json json_of(const engine::StepPlan& plan, const models::ModelConfig& model) {
  const auto count = models::count_parameters(model);
  Json json = {{"parameters", count.all}, {"active_parameters", count.active},
               {"unit", plan.unit},       {"costs", plan.costs},
               {"step", plan.step},       {"bubble", plan.bubble},
               {"steps", plan.steps},     {"ranks", plan.world_size},
               {"stages", Json::array()}};
  for (const auto& stage : plan.stages) {
    json["stages"].push_back(json_of(stage));
  }
  return json;
}

std::string text_of(const engine::StepPlan& plan,
                    const engine::RunConfig& config) {
  double exposed = 0;
  const engine::PlannedStage* fullest = &plan.stages.front();
  for (const auto& stage : plan.stages) {
    exposed = std::max(exposed, stage.times.exposed);
    if (stage.peak_bytes > fullest->peak_bytes) fullest = &stage;
  }
  const auto mesh = engine::mesh_of(config, plan.world_size);
  return c10::str("model       ", models::describe(config.model),
                  "\nmesh        ", mesh.describe(), "\n",
                  engine::stages_lines(config), "schedule    ", plan.schedule,
                  "\ncosts       ", plan.costs, "\nstep        ",
                  engine::amount(plan.step, plan.unit),
                  plan.steps > 1 ? " between others, without a flush" : "",
                  "\nbubble      ", percent(plan.bubble),
                  " of it, for other stages\nexposed     ",
                  engine::amount(exposed, plan.unit),
                  " at most, for collectives inside a stage"
                  "\nmemory      ",
                  bytes_text(fullest->peak_bytes), " at most, on rank ",
                  fullest->rank, "\n\n");
}

bool shows_colours() {
  const char* const none = std::getenv("NO_COLOR");
  return isatty(STDOUT_FILENO) == 1 && (none == nullptr || *none == '\0');
}

int64_t columns() {
  const char* const said = std::getenv("COLUMNS");
  const int64_t wide = said == nullptr ? 0 : std::strtoll(said, nullptr, 10);
  if (wide > 0) return std::min<int64_t>(wide, 1000);
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    return size.ws_col;
  }
  return 120;
}

}  // namespace

void add_drawing(CLI::App& command, DrawFlags& flags) {
  command.add_option("--svg", flags.svg, "the drawing, to this file");
  command.add_option("--times", flags.times,
                     "F,B,W[,MESSAGE]: what a micro-batch's forward, its "
                     "inputs' and its weights' gradients take on every stage, "
                     "and a message, in any unit");
  command.add_option("--device", flags.device,
                     "TFLOPS[,GB_PER_S]: the rates of a device and of its "
                     "memory; times are seconds");
  command
      .add_option("--link", flags.links,
                  "[AXIS=]MICROSECONDS,GB_PER_S: latency and bandwidth of an "
                  "axis of the mesh, or of all others; none: they take no time")
      ->allow_extra_args(false);
  command.add_option("--trace", flags.trace,
                     "a run's folder with monitor.trace: its measured step is "
                     "drawn below; without --device its times are taken");
}

void draw_step(const engine::RunConfig& config,
               const std::optional<planner::Cluster>& cluster,
               const DrawFlags& flags, const std::string& json) {
  engine::TracedRanks traced;
  if (!flags.trace.empty()) traced = report::read_trace(flags.trace);
  const auto costs = cluster ? cluster->costs(engine::mesh_of(
                                   config, engine::implied_world_size(config)))
                             : costs_of(flags, traced);
  const auto plan = engine::plan_step(config, costs);
  report::Drawing drawing{
      .unit = plan.unit,
      .panels = {engine::panel_of(plan, /*one_step=*/!traced.empty())}};
  if (!traced.empty()) {
    TS_CHECK_USAGE(plan.unit == "s",
                   "--times are in no unit that a measured step has. Leave "
                   "them out: the traced steps say how long stages take.");
    drawing.panels.push_back(engine::panel_of(traced, plan));
  }
  const auto hint = engine::bubble_hint(config);
  if (!hint.empty()) log::warning(hint);
  std::cout << text_of(plan, config)
            << report::text_of(drawing, columns(), shows_colours())
            << std::flush;
  if (!flags.svg.empty()) {
    write_file_atomic(flags.svg, report::svg_of(drawing));
  }
  if (!json.empty()) {
    write_file_atomic(json, json_of(plan, config.model).dump() + "\n");
  }
}

}  // namespace tessera::cli
