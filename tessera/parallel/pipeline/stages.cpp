#include "tessera/parallel/pipeline/stages.h"

#include <numeric>
#include <set>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/program/schedules/schedule.h"

namespace tessera::parallel::pipeline {
namespace {

// The units of every run, in order.
std::vector<std::vector<int64_t>> runs_of(int64_t layers,
                                          const PipelineOptions& options) {
  const int64_t count = options.stages * options.chunks;
  std::vector<std::vector<int64_t>> runs(count);
  int64_t unit = 0;
  runs.front().push_back(unit++);
  for (int64_t run = 0; run < count; ++run) {
    const int64_t length = options.split.empty()
                               ? layers / count + (run < layers % count ? 1 : 0)
                               : options.split[run];
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
           const PipelineOptions& options) {
  const int64_t p = options.stages, v = options.chunks, runs = p * v;
  const auto& schedule = program::schedules::named(options.schedule);
  TS_CHECK_CONFIG(v == 1 || (schedule.chunked && p > 1), "pipeline.chunks is ",
                  v, ", which needs pipeline.schedule ", chunked_schedules(),
                  " and mesh.pp of 2 or more (they are ", options.schedule,
                  " and ", p, "). Use pipeline.chunks 1.");
  TS_CHECK_CONFIG(runs <= model.layers, "mesh.pp (", p, ") x pipeline.chunks (",
                  v, ") = ", runs, " parts of the model, but model.layers is ",
                  model.layers, ". Use ", model.layers, " parts or fewer.");
  TS_CHECK_CONFIG(!schedule.multiple_of_stages || num_microbatches % p == 0,
                  "pipeline.schedule ", options.schedule,
                  " sends micro-batches in groups of mesh.pp (", p,
                  "), but a step has ", num_microbatches,
                  " of them. Nearest numbers of micro-batches: ",
                  nearest_multiples(num_microbatches, p),
                  "; see batch.global and batch.micro.");
  if (options.split.empty()) return;
  TS_CHECK_CONFIG(static_cast<int64_t>(options.split.size()) == runs,
                  "pipeline.split names ", options.split.size(),
                  " parts, but mesh.pp (", p, ") x pipeline.chunks (", v,
                  ") = ", runs, ".");
  const int64_t layers =
      std::accumulate(options.split.begin(), options.split.end(), int64_t{0});
  TS_CHECK_CONFIG(
      std::ranges::all_of(options.split, [](int64_t n) { return n >= 0; }) &&
          layers == model.layers,
      "pipeline.split adds up to ", layers,
      " layers, none negative, but model.layers is ", model.layers, ".");
  // The first part has the embedding too, the last one the head.
  for (int64_t run = 1; run + 1 < runs; ++run) {
    TS_CHECK_CONFIG(options.split[run] > 0, "pipeline.split gives part ", run,
                    " (from 0) no layer, and it has nothing else: between the "
                    "first and the last part each needs one.");
  }
}

std::vector<std::vector<int64_t>> units_of_stage(int64_t layers,
                                                 const PipelineOptions& options,
                                                 int64_t stage) {
  const auto runs = runs_of(layers, options);
  std::vector<std::vector<int64_t>> chunks;
  for (int64_t chunk = 0; chunk < options.chunks; ++chunk) {
    chunks.push_back(runs.at(chunk * options.stages + stage));
  }
  return chunks;
}

std::vector<std::vector<std::vector<int64_t>>> apply(
    models::Model& model, const PipelineOptions& options) {
  const int64_t layers = model.num_blocks();
  std::vector<std::vector<std::vector<int64_t>>> chunks;
  std::vector<int64_t> stage_of(model.num_units());
  for (int64_t stage = 0; stage < options.stages; ++stage) {
    chunks.push_back(units_of_stage(layers, options, stage));
    for (const auto& run : chunks.back()) {
      for (int64_t unit : run) stage_of[unit] = stage;
    }
  }
  if (options.stages == 1) return chunks;
  for (const auto& parameter : nn::parameters_of(model)) {
    std::set<int64_t> stages;
    for (int64_t unit : parameter.spec->units) stages.insert(stage_of[unit]);
    mesh::Layout& layout = parameter.spec->layout;
    layout = layout.on_stages({stages.begin(), stages.end()});
  }
  return chunks;
}

}  // namespace tessera::parallel::pipeline
