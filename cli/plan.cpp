// tessera plan: the fastest layouts of a run on a cluster, and a step before it
// is run, simulated and drawn.
#include <sys/ioctl.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <iostream>
#include <optional>

#include "cli/bench_flags.h"
#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/overrides.h"
#include "cli/plan_search.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/engine/bubble_hint.h"
#include "tessera/engine/cut_text.h"
#include "tessera/engine/deepspeed.h"
#include "tessera/engine/run_config.h"
#include "tessera/engine/step_drawing.h"
#include "tessera/engine/step_plan.h"
#include "tessera/mesh/axis.h"
#include "tessera/models/model.h"
#include "tessera/monitor/report/drawing.h"
#include "tessera/monitor/report/run_trace.h"
#include "tessera/planner/cluster.h"
#include "tessera/train/trained_model.h"

namespace tessera::cli {
namespace {

namespace report = monitor::report;

struct PlanFlags {
  std::string file;
  std::vector<std::string> sets;
  std::string deepspeed;  // "": none
  int64_t world = 0;      // 0: what the mesh asks for
  bool draw = false;
  std::string svg, json, trace;
  std::string times, device;
  std::vector<std::string> links;
  std::string cluster;  // its description; "": none
  int64_t top = 0;      // 0: 5
  std::string emit;
};

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

engine::PlanCosts costs_of(const PlanFlags& flags,
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
  for (const auto& each : flags.links) costs.links.insert(link_of(each));
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

class PlanCommand {
 public:
  PlanCommand(const PlanFlags& flags, const std::vector<std::string>& extras)
      : flags_(flags) {
    check_usage();
    config_ = engine::read_run_config(
        flags.file, overrides_of(flags.sets, extras), &origins_);
    if (!flags.deepspeed.empty()) {
      deepspeed_.emplace(flags.deepspeed);
      deepspeed_->apply(config_, origins_);
    }
    const std::vector<OutputFile> outputs = {
        {"--svg", flags.svg}, {"--json", flags.json}, {"--emit", flags.emit}};
    check_output_files(outputs);
    for (const auto& output : outputs) check_unread(output);
    train::read_model_source(config_, origins_);
    if (!flags.cluster.empty()) cluster_ = planner::read_cluster(flags.cluster);
    if (!flags.draw) return;
    // Nothing is read of it.
    if (config_.data.train.empty()) config_.data.train = {"any text"};
    const int64_t world =
        flags.world > 0 ? flags.world : engine::implied_world_size(config_);
    if (deepspeed_) deepspeed_->apply_batch(config_, world, origins_);
    engine::complete(config_, world);
    if (cluster_) {
      cluster_->check_world(world);
      config_.run.device_types = {cluster_->device_type()};
    }
    TS_CHECK_CONFIG(!config_.mesh.star(),
                    "plan draws ranks; mesh.data_parallel dp has one. Use "
                    "ddp.");
  }

  void run() {
    if (flags_.draw) return draw();
    const int64_t world =
        flags_.world > 0 ? flags_.world : cluster_->num_devices();
    if (deepspeed_) deepspeed_->apply_batch(config_, world, origins_);
    search_plans(config_, origins_, *cluster_,
                 {.world = world,
                  .top = flags_.top > 0 ? flags_.top : 5,
                  .emit = flags_.emit,
                  .json = flags_.json});
  }

 private:
  void check_usage() const {
    TS_CHECK_USAGE(flags_.draw || !flags_.cluster.empty(),
                   "plan searches for the fastest layout on a cluster "
                   "(--cluster C.json), or shows the step of the mesh that "
                   "RUN.json names (--draw). Give one of them.");
    TS_CHECK_USAGE(
        flags_.draw || (flags_.svg.empty() && flags_.trace.empty() &&
                        flags_.times.empty() && flags_.device.empty() &&
                        flags_.links.empty()),
        "--svg, --trace, --times, --device and --link are of a step "
        "that is drawn: give --draw too.");
    TS_CHECK_USAGE(!flags_.draw || (flags_.emit.empty() && flags_.top == 0),
                   "--emit and --top are of a search, and --draw searches "
                   "nothing. Leave it or them out.");
    TS_CHECK_USAGE(flags_.cluster.empty() ||
                       (flags_.times.empty() && flags_.device.empty() &&
                        flags_.links.empty()),
                   "--cluster says how fast devices and links are, and so do "
                   "--times, --device and --link. Leave these out.");
  }

  engine::PlanCosts costs(const engine::TracedRanks& traced) const {
    if (!cluster_) return costs_of(flags_, traced);
    return cluster_->costs(
        engine::mesh_of(config_, engine::implied_world_size(config_)));
  }

  void draw() const {
    engine::TracedRanks traced;
    if (!flags_.trace.empty()) traced = report::read_trace(flags_.trace);
    const auto plan = engine::plan_step(config_, costs(traced));
    report::Drawing drawing{
        .unit = plan.unit,
        .panels = {engine::panel_of(plan, /*one_step=*/!traced.empty())}};
    if (!traced.empty()) {
      TS_CHECK_USAGE(plan.unit == "s",
                     "--times are in no unit that a measured step has. Leave "
                     "them out: the traced steps say how long stages take.");
      drawing.panels.push_back(engine::panel_of(traced, plan));
    }
    const auto hint = engine::bubble_hint(config_);
    if (!hint.empty()) log::warning(hint);
    std::cout << text_of(plan)
              << report::text_of(drawing, columns(), shows_colours())
              << std::flush;
    if (!flags_.svg.empty()) {
      write_file_atomic(flags_.svg, report::svg_of(drawing));
    }
    if (!flags_.json.empty()) {
      write_file_atomic(flags_.json,
                        json_of(plan, config_.model).dump() + "\n");
    }
  }

  std::string text_of(const engine::StepPlan& plan) const {
    double exposed = 0;
    const engine::PlannedStage* fullest = &plan.stages.front();
    for (const auto& stage : plan.stages) {
      exposed = std::max(exposed, stage.times.exposed);
      if (stage.peak_bytes > fullest->peak_bytes) fullest = &stage;
    }
    const auto mesh = engine::mesh_of(config_, plan.world_size);
    return c10::str("model       ", models::describe(config_.model),
                    "\nmesh        ", mesh.describe(), "\n",
                    engine::stages_lines(config_), "schedule    ",
                    plan.schedule, "\ncosts       ", plan.costs,
                    "\nstep        ", engine::amount(plan.step, plan.unit),
                    plan.steps > 1 ? " between others, without a flush" : "",
                    "\nbubble      ", percent(plan.bubble),
                    " of it, for other stages\nexposed     ",
                    engine::amount(exposed, plan.unit),
                    " at most, for collectives inside a stage"
                    "\nmemory      ",
                    bytes_text(fullest->peak_bytes), " at most, on rank ",
                    fullest->rank, "\n\n");
  }

  // What is read is not written.
  void check_unread(const OutputFile& output) const {
    std::error_code none;  // equivalent() asks for files that are there
    for (const std::string& input :
         {flags_.file, flags_.deepspeed, flags_.cluster}) {
      TS_CHECK_USAGE(!std::filesystem::equivalent(output.path, input, none),
                     output.flag, " names ", output.path,
                     ", which this command reads. Name another file.");
    }
  }

  const PlanFlags& flags_;
  engine::RunConfig config_;
  config::Provenance origins_;
  std::optional<engine::DeepSpeed> deepspeed_;
  std::optional<planner::Cluster> cluster_;
};

void add_costs(CLI::App& command, PlanFlags& flags) {
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

}  // namespace

void add_plan(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "plan",
      "Find the fastest layout on a cluster, or show a step before it is run: "
      "time, bubble, memory, a drawing");
  auto flags = std::make_shared<PlanFlags>();
  command->add_option("RUN.json", flags->file, "the configuration")->required();
  add_sets(*command, flags->sets);
  command->add_option(
      "--deepspeed", flags->deepspeed,
      "DeepSpeed's JSON, as it is, for what the run's leaves out");
  command
      ->add_option("--world", flags->world,
                   "ranks; none: as many as the mesh asks for, or the cluster "
                   "has devices")
      ->check(whole_number(1, 1 << 24));
  command->add_flag("--draw", flags->draw,
                    "draw the step of the mesh that RUN.json names");
  command->add_option("--svg", flags->svg, "the drawing, to this file");
  command->add_option(
      "--json", flags->json,
      "what is drawn, each instruction with its times, or what was found, to "
      "this file");
  command->add_option(
      "--cluster", flags->cluster,
      "a description of nodes, devices and links (JSON): search "
      "for the fastest layout there, or draw with its rates");
  command
      ->add_option("--top", flags->top, "layouts that are shown; without it 5")
      ->check(whole_number(1, 1000));
  command->add_option("--emit", flags->emit,
                      "the first layout's configuration, to this file");
  add_costs(*command, *flags);
  take_keys(*command);
  command->footer(
      "No rank is started. Without --cluster, --times, --device or --trace a "
      "step is counted in operations. A search keeps the keys that are set.\n"
      "Examples:\n"
      "  tessera plan run.json --cluster c.json --top 3 --emit fast.json\n"
      "  tessera plan run.json --draw --mesh.pp=4 --batch.micro=1\n"
      "  tessera plan run.json --draw --times 1,1,1 --svg step.svg\n"
      "  tessera plan run.json --draw --device 300,2000 --link pp=5,25\n"
      "  tessera plan runs/NAME/config.json --draw --trace runs/NAME");
  command->callback(
      [command, flags] { PlanCommand(*flags, command->remaining()).run(); });
}

}  // namespace tessera::cli
