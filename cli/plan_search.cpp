#include "cli/plan_search.h"

#include <c10/util/StringUtil.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>

#include "tessera/core/detail/json.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/engine/step_drawing.h"
#include "tessera/models/model.h"
#include "tessera/planner/search.h"

namespace tessera::cli {
namespace {

using planner::Plan;
using planner::Search;

std::string text_of(const planner::Cluster& cluster) {
  const auto link = [](const planner::ClusterLink& of) {
    return c10::str(of.gb_per_s, " GB/s and ", of.latency_us, " us");
  };
  std::string text =
      c10::str(cluster.nodes, cluster.nodes == 1 ? " node of " : " nodes of ",
               cluster.devices_per_node, " x ", cluster.device.tflops,
               " TFLOPS and ", cluster.device.memory_gib, " GiB");
  if (cluster.devices_per_node > 1) text += "; " + link(cluster.in_node);
  if (cluster.nodes > 1) {
    text += "; between nodes " + link(cluster.between_nodes);
  }
  return text;
}

// How much of the space was looked at.
std::string text_of(const Search& search) {
  std::string text = c10::str(search.layouts, " layouts: ", search.simulated,
                              " simulated, ", search.too_large, " too large, ",
                              search.refused, " refused by a rule, ",
                              search.ruled_out, " slower by their bounds");
  if (search.left > 0) {
    text += c10::str(
        ", ", search.left, " less promising ones not looked at, none below ",
        fixed(search.left_bound_s / search.plans.front().step_s, 2),
        " of the best step");
  }
  return text;
}

// What the first plan's keys are, but for those that say nothing.
std::string layout_text(const engine::RunConfig& config) {
  const auto& mesh = config.mesh;
  std::string text;
  const auto add = [&](const char* name, int64_t degree) {
    if (degree > 1) text += c10::str(name, " ", degree, " ");
  };
  add("pp", mesh.pp);
  add("dp_replicate", mesh.dp_replicate);
  add("dp_shard", mesh.dp_shard);
  add("cp", mesh.cp);
  add("tp", mesh.tp);
  add("ep", mesh.ep);
  if (text.empty()) text = "one rank ";
  text += c10::str("zero ", config.zero.stage, " micro ", config.batch.micro);
  if (mesh.pp > 1) text += " " + planner::schedule_text(config);
  if (config.recompute.mode != "none") {
    text += " recompute " + config.recompute.mode;
  }
  return text;
}

std::string line_of(size_t number, const Plan& plan) {
  char line[160];
  std::snprintf(line, sizeof line, "%3zu  %9s %14s %6s %7s %8s %10s %10s  ",
                number, engine::amount(plan.step_s, "s").c_str(),
                count_text(static_cast<int64_t>(plan.tokens_per_s)).c_str(),
                percent(plan.mfu).c_str(), percent(plan.bubble).c_str(),
                percent(plan.exposed).c_str(),
                bytes_text(plan.peak_bytes).c_str(),
                bytes_text(plan.moved_bytes).c_str());
  return line + layout_text(plan.config) + "\n";
}

// As the user would write it: to be read by `tessera train`.
std::string configuration_of(const Plan& plan, const engine::RunConfig& base) {
  engine::RunConfig config = plan.config;
  config.run = base.run;
  // Who reads it shares layers out alike.
  if (config.pipeline.is_split_chosen) config.pipeline.split.clear();
  config.data.train = base.data.train;
  return to_json(config);
}

using detail::Json;

Json json_of(const Plan& plan) {
  return {{"mesh", plan.mesh},
          {"layout", layout_text(plan.config)},
          {"step_s", plan.step_s},
          {"tokens_per_s", plan.tokens_per_s},
          {"mfu", plan.mfu},
          {"bubble", plan.bubble},
          {"exposed_communication", plan.exposed},
          {"peak_bytes", plan.peak_bytes},
          {"moved_bytes", plan.moved_bytes}};
}

Json json_of(const Search& search, const std::vector<std::string>& reasons,
             const std::vector<planner::Change>& changes) {
  Json json = {{"layouts", search.layouts},
               {"simulated", search.simulated},
               {"too_large", search.too_large},
               {"refused", search.refused},
               {"ruled_out", search.ruled_out},
               {"left", search.left},
               {"left_bound_s", search.left_bound_s},
               {"plans", Json::array()},
               {"reasons", reasons}};
  for (const Plan& plan : search.plans) json["plans"].push_back(json_of(plan));
  for (const auto& change : changes) json["changes"][change.what] = change.step;
  return json;
}

// Every ten seconds.
std::function<void(const Search&)> progress() {
  using Clock = std::chrono::steady_clock;
  return [told_at = Clock::now()](const Search& found) mutable {
    if (Clock::now() - told_at < std::chrono::seconds(10)) return;
    told_at = Clock::now();
    log::info("plan: ", text_of(found), "; the fastest so far: ",
              found.plans.empty()
                  ? "none that fits"
                  : engine::amount(found.plans.front().step_s, "s"));
  };
}

}  // namespace

void search_plans(const engine::RunConfig& config,
                  const config::Provenance& origins,
                  const planner::Cluster& cluster, const SearchFlags& flags) {
  engine::RunConfig base = config;
  if (base.data.train.empty()) base.data.train = {"any text"};  // none is read
  base.run.device = "cpu";  // of this host; the cluster has its own
  base.model.complete();
  const int64_t world = flags.world;
  const Search found = planner::search(
      base, cluster,
      {.world_size = world, .top = flags.top, .progress = progress()},
      [&](const std::string& key) { return config::is_set(origins, key); });
  const auto reasons = planner::reasons_of(found, cluster);
  const auto changes = planner::changes_of(found.plans.front(), cluster);
  std::cout << "model       " << models::describe(base.model)
            << "\ncluster     " << text_of(cluster) << "\nranks       " << world
            << "\nbatch       " << base.batch.global << " samples of "
            << base.data.seq_len << " tokens\nsearched    " << text_of(found)
            << "\n\n          step       tokens/s    mfu  bubble  exposed     "
               "memory      moved  layout\n";
  size_t number = 0;
  for (const Plan& plan : found.plans) std::cout << line_of(++number, plan);
  std::cout << "\nwhy 1\n";
  for (const auto& reason : reasons) std::cout << "  " << reason << "\n";
  std::cout << "\nwhat would help 1 as it is: the step's length\n";
  for (const auto& change : changes) {
    std::cout << "  " << percent(change.step) << "  " << change.what << "\n";
  }
  std::cout << std::flush;
  if (!flags.emit.empty()) {
    write_file_atomic(flags.emit,
                      configuration_of(found.plans.front(), config));
  }
  if (!flags.json.empty()) {
    write_file_atomic(flags.json,
                      json_of(found, reasons, changes).dump() + "\n");
  }
}

}  // namespace tessera::cli
