#include "tessera/parallel/pipeline/stages.h"

#include <numeric>
#include <set>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/program/schedules/schedule.h"

namespace tessera::parallel::pipeline {
namespace {

// "interleaved, ... or ...".
std::string chunked_schedules() {
  std::vector<std::string> found;
  for (const auto& schedule : program::schedules::all()) {
    if (schedule.chunked && schedule.exact_chunks == 0) {
      found.emplace_back(schedule.name);
    }
  }
  std::string names;
  for (size_t i = 0; i < found.size(); ++i) {
    const bool is_last = i + 1 == found.size();
    names += (i == 0 ? "" : is_last ? " or " : ", ") + found[i];
  }
  return names;
}

void check_chunks(const program::schedules::Schedule& schedule, int64_t p,
                  int64_t v) {
  const int64_t exact = schedule.exact_chunks;
  if (exact > 0) {
    TS_CHECK_CONFIG(v == exact, "pipeline.schedule ", schedule.name, " has ",
                    exact, " chunks a rank, but pipeline.chunks is ", v,
                    ". Use pipeline.chunks ", exact, ".");
    return;
  }
  TS_CHECK_CONFIG(v == 1 || (schedule.chunked && p > 1), "pipeline.chunks is ",
                  v, ", which needs pipeline.schedule ", chunked_schedules(),
                  " and mesh.pp of 2 or more (they are ", schedule.name,
                  " and ", p, "). Use pipeline.chunks 1.");
}

// A schedule of a file has one shape.
void check_shape(const program::schedules::Schedule& schedule, int64_t p,
                 int64_t v, int64_t num_microbatches) {
  const auto& only = *schedule.only;
  TS_CHECK_CONFIG(
      takes(schedule,
            {.stages = p, .chunks = v, .num_microbatches = num_microbatches}),
      "pipeline.schedule ", schedule.name, " is for mesh.pp ", only.stages,
      ", pipeline.chunks ", only.chunks, " and ", only.num_microbatches,
      " micro-batches, but they are ", p, ", ", v, " and ", num_microbatches,
      ".");
}

void check_microbatches(const program::schedules::Schedule& schedule, int64_t p,
                        int64_t v, int64_t num_microbatches) {
  const bool in_groups = schedule.multiple_of_stages && v > 1;
  TS_CHECK_CONFIG(!in_groups || num_microbatches % p == 0, "pipeline.schedule ",
                  schedule.name, " sends micro-batches in groups of mesh.pp (",
                  p, "), but a step has ", num_microbatches,
                  " of them. Nearest numbers of micro-batches: ",
                  nearest_multiples(num_microbatches, p),
                  "; see batch.global and batch.micro.");
  TS_CHECK_CONFIG(!schedule.in_pairs || p % 2 == 0, "pipeline.schedule ",
                  schedule.name,
                  " has two pipelines that face each other: "
                  "mesh.pp is even, but it is ",
                  p, ". Nearest: ", nearest_multiples(p, 2), ".");
  TS_CHECK_CONFIG(!schedule.in_pairs || num_microbatches % 2 == 0,
                  "pipeline.schedule ", schedule.name,
                  " gives each of its two pipelines half of the micro-batches, "
                  "but a step has ",
                  num_microbatches,
                  " of them. Nearest numbers of micro-batches: ",
                  nearest_multiples(num_microbatches, 2),
                  "; see batch.global and batch.micro.");
  TS_CHECK_CONFIG(!schedule.delayed || num_microbatches >= p,
                  "pipeline.schedule ", schedule.name,
                  " goes on from step to step with two versions of the "
                  "weights, which are enough for as many micro-batches as "
                  "mesh.pp (",
                  p, ") or more, but a step has ", num_microbatches,
                  " of them. Nearest number of micro-batches: ", p,
                  "; see batch.global and batch.micro.");
}

}  // namespace

std::vector<std::vector<int64_t>> units_of_runs(int64_t layers, int64_t count,
                                                const PipelineConfig& config,
                                                int64_t ahead) {
  std::vector<std::vector<int64_t>> runs(count);
  int64_t unit = 0;
  runs.front().push_back(unit++);
  for (int64_t run = 0; run < count; ++run) {
    const int64_t length = config.split.empty()
                               ? layers / count + (run < layers % count ? 1 : 0)
                               : config.split[run];
    for (int64_t i = 0; i < length; ++i) runs[run].push_back(unit++);
  }
  for (int64_t i = 0; i <= ahead; ++i) runs.back().push_back(unit++);
  return runs;
}

void check(const models::ModelConfig& model, int64_t num_microbatches,
           const mesh::DeviceMesh& mesh, const PipelineConfig& config) {
  const auto pipeline = config.pipeline(mesh.degree(mesh::Axis::kPp));
  const int64_t p = pipeline.stages, v = pipeline.chunks;
  const int64_t runs = pipeline.num_runs();
  const auto& schedule = program::schedules::named(config.schedule);
  schedule.only ? check_shape(schedule, p, v, num_microbatches)
                : check_chunks(schedule, p, v);
  // Of two replicas each is cut into p.
  const std::string cut =
      runs == p ? c10::str("mesh.pp (", p, ")")
                : c10::str("mesh.pp (", p, ") x pipeline.chunks (", v, ")");
  TS_CHECK_CONFIG(runs <= model.layers, cut, " = ", runs,
                  " parts of the model, but model.layers is ", model.layers,
                  ". Use ", model.layers, " parts or fewer.");
  check_microbatches(schedule, p, v, num_microbatches);
  if (config.split.empty()) return;
  TS_CHECK_CONFIG(static_cast<int64_t>(config.split.size()) == runs,
                  "pipeline.split names ", config.split.size(), " parts, but ",
                  cut, " = ", runs, ". ", mesh::kStagesAreAlike,
                  ". Where a run chose it and left it in its config.json, take "
                  "it out: --pipeline.split=[].");
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
  const int64_t layers = model.num_blocks() - model.num_ahead();
  const int64_t stages = mesh.degree(mesh::Axis::kPp);
  const auto pipeline = config.pipeline(stages);
  const auto runs =
      units_of_runs(layers, pipeline.num_runs(), config, model.num_ahead());
  std::vector<std::vector<std::vector<int64_t>>> chunks(stages);
  for (int64_t stage = 0; stage < stages; ++stage) {
    for (int64_t chunk = 0; chunk < pipeline.chunks; ++chunk) {
      chunks[stage].push_back(runs.at(pipeline.run_of({stage, chunk})));
    }
  }
  if (stages == 1) return chunks;
  std::vector<std::vector<int64_t>> holders_of(model.num_units());
  for (int64_t run = 0; run < pipeline.num_runs(); ++run) {
    for (int64_t unit : runs[run]) holders_of[unit] = pipeline.holders_of(run);
  }
  for (const auto& parameter : nn::parameters_of(model)) {
    std::set<int64_t> holders;
    for (int64_t unit : parameter.spec->units) {
      holders.insert(holders_of[unit].begin(), holders_of[unit].end());
    }
    mesh::Layout& layout = parameter.spec->layout;
    layout = layout.on_stages({holders.begin(), holders.end()});
  }
  return chunks;
}

}  // namespace tessera::parallel::pipeline
