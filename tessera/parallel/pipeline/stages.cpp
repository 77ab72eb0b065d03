#include "tessera/parallel/pipeline/stages.h"

#include <numeric>
#include <set>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/program/schedules/schedule.h"

namespace tessera::parallel::pipeline {
namespace {

// The units of every run, in order.
std::vector<std::vector<int64_t>> runs_of(int64_t layers, int64_t stages,
                                          const PipelineConfig& config) {
  const int64_t count = stages * config.chunks;
  std::vector<std::vector<int64_t>> runs(count);
  int64_t unit = 0;
  runs.front().push_back(unit++);
  for (int64_t run = 0; run < count; ++run) {
    const int64_t length = config.split.empty()
                               ? layers / count + (run < layers % count ? 1 : 0)
                               : config.split[run];
    for (int64_t i = 0; i < length; ++i) runs[run].push_back(unit++);
  }
  runs.back().push_back(unit);
  return runs;
}

// "interleaved or ...".
std::string chunked_schedules() {
  std::string names;
  for (const auto& schedule : program::schedules::all()) {
    if (!schedule.chunked) continue;
    names += std::string(names.empty() ? "" : " or ") + schedule.name;
  }
  return names;
}

}  // namespace

void check(const models::ModelConfig& model, int64_t num_microbatches,
           const mesh::DeviceMesh& mesh, const PipelineConfig& config) {
  const int64_t p = mesh.degree(mesh::Axis::kPp), v = config.chunks;
  const int64_t runs = p * v;
  const auto& schedule = program::schedules::named(config.schedule);
  TS_CHECK_CONFIG(v == 1 || (schedule.chunked && p > 1), "pipeline.chunks is ",
                  v, ", which needs pipeline.schedule ", chunked_schedules(),
                  " and mesh.pp of 2 or more (they are ", config.schedule,
                  " and ", p, "). Use pipeline.chunks 1.");
  TS_CHECK_CONFIG(runs <= model.layers, "mesh.pp (", p, ") x pipeline.chunks (",
                  v, ") = ", runs, " parts of the model, but model.layers is ",
                  model.layers, ". Use ", model.layers, " parts or fewer.");
  TS_CHECK_CONFIG(!schedule.multiple_of_stages || num_microbatches % p == 0,
                  "pipeline.schedule ", config.schedule,
                  " sends micro-batches in groups of mesh.pp (", p,
                  "), but a step has ", num_microbatches,
                  " of them. Nearest numbers of micro-batches: ",
                  nearest_multiples(num_microbatches, p),
                  "; see batch.global and batch.micro.");
  if (config.split.empty()) return;
  TS_CHECK_CONFIG(static_cast<int64_t>(config.split.size()) == runs,
                  "pipeline.split names ", config.split.size(),
                  " parts, but mesh.pp (", p, ") x pipeline.chunks (", v,
                  ") = ", runs, ".");
  const int64_t layers =
      std::accumulate(config.split.begin(), config.split.end(), int64_t{0});
  TS_CHECK_CONFIG(
      std::ranges::all_of(config.split, [](int64_t n) { return n >= 0; }) &&
          layers == model.layers,
      "pipeline.split adds up to ", layers,
      " layers, none negative, but model.layers is ", model.layers, ".");
  // The first part has the embedding too, the last one the head.
  for (int64_t run = 1; run + 1 < runs; ++run) {
    TS_CHECK_CONFIG(config.split[run] > 0, "pipeline.split gives part ", run,
                    " (from 0) no layer, and it has nothing else: between the "
                    "first and the last part each needs one.");
  }
}

std::vector<std::vector<std::vector<int64_t>>> apply(
    models::Model& model, const mesh::DeviceMesh& mesh,
    const PipelineConfig& config) {
  const int64_t layers = model.num_blocks();
  const int64_t stages = mesh.degree(mesh::Axis::kPp);
  const auto runs = runs_of(layers, stages, config);
  std::vector<std::vector<std::vector<int64_t>>> chunks(stages);
  std::vector<int64_t> stage_of(model.num_units());
  for (size_t run = 0; run < runs.size(); ++run) {
    const int64_t stage = static_cast<int64_t>(run) % stages;
    chunks[stage].push_back(runs[run]);
    for (int64_t unit : runs[run]) stage_of[unit] = stage;
  }
  if (stages == 1) return chunks;
  for (const auto& parameter : nn::parameters_of(model)) {
    std::set<int64_t> holders;
    for (int64_t unit : parameter.spec->units) holders.insert(stage_of[unit]);
    mesh::Layout& layout = parameter.spec->layout;
    layout = layout.on_stages({holders.begin(), holders.end()});
  }
  return chunks;
}

}  // namespace tessera::parallel::pipeline
