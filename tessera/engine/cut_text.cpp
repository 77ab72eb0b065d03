#include "tessera/engine/cut_text.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "tessera/core/units.h"
#include "tessera/engine/model_cut.h"

namespace tessera::engine {
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

// Whether samples are shared out by what pipeline.cut says that layers cost.
bool shares_by_cut(const RunConfig& config) {
  return !config.pipeline.cuts_by_run() && data_parallel_degree(config) > 1 &&
         (config.mesh.uneven() || config.mesh.measure_speeds);
}

}  // namespace

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

std::string stages_lines(const RunConfig& config) {
  std::string lines;
  if (config.mesh.pp > 1) lines = "stages      " + split_text(config) + "\n";
  const std::string seen = seen_text(config);
  return seen.empty() ? lines : lines + "            " + seen + "\n";
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

std::vector<std::string> idle_cuts(const RunConfig& config) {
  std::vector<std::string> found;
  const auto& of = config.pipeline;
  const bool is_given = !of.split.empty() && !of.is_split_chosen;
  if (of.cut != "layers" && config.mesh.pp == 1) {
    found.emplace_back("pipeline.cut is not used while mesh.pp is 1");
  } else if (of.cut != "layers" && is_given && !shares_by_cut(config)) {
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
