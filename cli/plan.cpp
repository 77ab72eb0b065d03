// tessera plan: the flags, and what each of its two answers is given: the
// fastest layouts (plan_search.h), or a step (plan_drawing.h).
#include <c10/util/StringUtil.h>

#include <filesystem>
#include <optional>

#include "cli/bench_flags.h"
#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/overrides.h"
#include "cli/plan_drawing.h"
#include "cli/plan_search.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/data/file_list.h"
#include "tessera/engine/deepspeed.h"
#include "tessera/engine/run_config.h"
#include "tessera/planner/cluster.h"
#include "tessera/train/trained_model.h"

namespace tessera::cli {
namespace {

struct PlanFlags {
  std::string file;
  std::vector<std::string> sets;
  std::string deepspeed;  // "": none
  int64_t world = 0;      // 0: what the mesh asks for
  bool draw = false;
  DrawFlags drawing;
  std::string json;
  std::string cluster;  // its description; "": none
  int64_t top = 0;      // 0: 5
  std::string emit;
};

class PlanCommand {
 public:
  PlanCommand(const PlanFlags& flags, const std::vector<std::string>& extras)
      : flags_(flags) {
    check_usage();
    config_ = engine::read_planned_config(
        flags.file, overrides_of(flags.sets, extras), &origins_);
    if (!flags.deepspeed.empty()) {
      deepspeed_.emplace(flags.deepspeed);
      deepspeed_->apply(config_, origins_);
    }
    const std::vector<OutputFile> outputs = {{"--svg", flags.drawing.svg},
                                             {"--json", flags.json},
                                             {"--emit", flags.emit}};
    check_output_files(outputs);
    check_unread(outputs);
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
      cluster_->check_world(
          world, flags_.world > 0
                     ? c10::str("--world ", world, " is")
                     : c10::str("the mesh asks for ", world, " ranks,"));
      config_.run.device_types = {cluster_->device_type()};
    }
    TS_CHECK_CONFIG(!config_.mesh.star(),
                    "plan draws ranks; mesh.data_parallel dp has one. Use "
                    "ddp.");
  }

  void run() {
    if (flags_.draw) {
      return draw_step(config_, cluster_, flags_.drawing, flags_.json);
    }
    const int64_t world =
        flags_.world > 0 ? flags_.world : cluster_->num_devices();
    if (deepspeed_) {
      const auto idle = deepspeed_->check_searched_batch(config_, origins_);
      if (!idle.empty()) log::warning(idle, ".");
    }
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
    TS_CHECK_USAGE(flags_.draw || (flags_.drawing.svg.empty() &&
                                   flags_.drawing.trace.empty() &&
                                   !flags_.drawing.say_costs()),
                   "--svg, --trace, --times, --device and --link are of a step "
                   "that is drawn: give --draw too.");
    TS_CHECK_USAGE(!flags_.draw || (flags_.emit.empty() && flags_.top == 0),
                   "--emit and --top are of a search, and --draw searches "
                   "nothing. Leave it or them out.");
    TS_CHECK_USAGE(flags_.cluster.empty() || !flags_.drawing.say_costs(),
                   "--cluster says how fast devices and links are, and so do "
                   "--times, --device and --link. Leave these out.");
  }

  // Those that are here: a plan is made without them too.
  std::vector<std::string> data_files() const {
    std::vector<std::string> files;
    for (const auto* paths : {&config_.data.train, &config_.data.valid}) {
      for (const std::string& path : *paths) {
        try {
          const auto found = data::expand_paths({path}, "data", {});
          files.insert(files.end(), found.begin(), found.end());
        } catch (const Error& error) {
          log::debug(message_of(error));
        }
      }
    }
    return files;
  }

  // What is read, or is data of the run, is not written.
  void check_unread(std::vector<OutputFile> outputs) const {
    std::error_code none;  // where a folder on the way is no folder, say
    std::erase_if(outputs, [&](const OutputFile& output) {
      return !std::filesystem::exists(output.path, none);
    });
    if (outputs.empty()) return;
    std::vector<std::string> inputs = data_files();
    inputs.insert(inputs.end(), {flags_.file, flags_.deepspeed, flags_.cluster,
                                 config_.data.tokenizer});
    for (const OutputFile& output : outputs) {
      for (const std::string& input : inputs) {
        TS_CHECK_USAGE(!std::filesystem::equivalent(output.path, input, none),
                       output.flag, " names ", output.path,
                       ", which this command reads. Name another file.");
      }
    }
  }

  const PlanFlags& flags_;
  engine::RunConfig config_;
  config::Provenance origins_;
  std::optional<engine::DeepSpeed> deepspeed_;
  std::optional<planner::Cluster> cluster_;
};

}  // namespace

void add_plan(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "plan",
      "Find the fastest layout on a cluster, or show a step before it is run: "
      "time, bubble, memory, a drawing");
  auto flags = std::make_shared<PlanFlags>();
  command->add_option("RUN.json", flags->file, "the configuration")->required();
  add_sets(*command, flags->sets);
  command
      ->add_option("--deepspeed", flags->deepspeed,
                   "DeepSpeed's JSON, as it is, for what the run's leaves out")
      ->check(some_path());
  command
      ->add_option("--world", flags->world,
                   "ranks; none: as many as the mesh asks for, or the cluster "
                   "has devices")
      ->check(whole_number(1, 1 << 24));
  command->add_flag("--draw", flags->draw,
                    "draw the step of the mesh that RUN.json names");
  command
      ->add_option("--json", flags->json,
                   "what is drawn, each instruction with its times, or what "
                   "was found, to this file")
      ->check(some_path());
  command
      ->add_option("--cluster", flags->cluster,
                   "a description of nodes, devices and links (JSON): search "
                   "for the fastest layout there, or draw with its rates")
      ->check(some_path());
  command
      ->add_option("--top", flags->top, "layouts that are shown; without it 5")
      ->check(whole_number(1, 1000));
  command
      ->add_option("--emit", flags->emit,
                   "the first layout's configuration, to this file")
      ->check(some_path());
  add_drawing(*command, flags->drawing);
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
