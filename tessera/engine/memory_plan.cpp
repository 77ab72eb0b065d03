#include "tessera/engine/memory_plan.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "tessera/engine/batch_share.h"
#include "tessera/engine/rank_model.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/sample_shares.h"
#include "tessera/engine/step_programs.h"
#include "tessera/optim/registry.h"
#include "tessera/parallel/facts.h"
#include "tessera/program/memory.h"

namespace tessera::engine {
using program::Facts;

namespace {

parallel::data::KeptStates kept_by(const optim::OptimizerConfig& config) {
  const optim::UpdateRule& rule = optim::update_rule(config.type);
  const optim::UpdateRule& others =
      rule.others.empty() ? rule : optim::update_rule(rule.others);
  parallel::data::KeptStates kept{
      .moments = std::ssize(others.moments_with(config)),
      .matrix_moments = std::ssize(rule.moments_with(config)),
      .average = config.ema > 0};
  if (config.state_dtype != "auto") {
    kept.dtype = config.state_dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  }
  return kept;
}

// Of what one rank reads for several the others have views, but for the part
// of a rank of cp, and for what is ahead of it, which each makes itself.
void share_batch(const RunConfig& config, const mesh::DeviceMesh& mesh,
                 int64_t samples, Facts& facts) {
  if (!reads_for_others(config)) return;
  facts.shared_batch_bytes = extent_of_step(config, samples).elements() *
                             static_cast<int64_t>(sizeof(int64_t));
  const auto bytes_of = [&](int64_t tokens) {
    return samples * tokens * static_cast<int64_t>(sizeof(int64_t));
  };
  const bool is_cut = mesh.degree(mesh::Axis::kCp) > 1;
  const int64_t depths = config.model.mtp.layers;
  facts.batch_bytes =
      2 * (depths + (is_cut ? 1 : 0)) *
      bytes_of(parallel::local_length(config.data.seq_len, mesh));
  facts.whole_batch_bytes = is_cut ? depths * bytes_of(config.data.seq_len) : 0;
}

// What comes to a rank's experts, over what it sends to experts: as many rows
// come to each rank that shares them out, whatever the samples of each.
double received_rows(const RunConfig& config, const mesh::DeviceMesh& mesh,
                     const mesh::Coord& coord, int64_t samples) {
  if (config.batch.rows.empty() || mesh.degree(mesh::Axis::kEp) == 1) return 1;
  const SampleShares shares(config);
  const auto peers = mesh.peers(mesh.rank_at(coord), {mesh::Axis::kEp});
  int64_t sent = 0;
  for (const int64_t peer : peers) {
    sent += shares.rows_of(mesh.data_rank_of(mesh.coord_of(peer)));
  }
  return static_cast<double>(sent) /
         static_cast<double>(samples * std::ssize(peers));
}

}  // namespace

int64_t batches_that_wait(const RunConfig& config) {
  return config.mesh.star() ? 1 : accumulation(config);
}

RunFacts::RunFacts(const RunConfig& config, const mesh::DeviceMesh& mesh)
    : config_(config), mesh_(mesh), placed_(config.model, mesh, config) {}

Facts facts_of(const RunConfig& config, const mesh::DeviceMesh& mesh,
               const mesh::Coord& coord, program::Purpose purpose) {
  return RunFacts(config, mesh).of(coord, purpose);
}

Facts RunFacts::of(const mesh::Coord& coord, program::Purpose purpose) const {
  const auto& [config, mesh] = std::tie(config_, mesh_);
  const auto& model = config.model;
  const bool trains = purpose == program::Purpose::kTraining;
  const int64_t samples =
      trains ? SampleShares(config).rows_of(mesh.data_rank_of(coord))
             : config.batch.micro;
  Facts facts = placed_.facts_of(
      coord,
      {.samples = samples,
       .seq_len = config.data.seq_len,
       .documents = config.data.documents_apart(),
       .received_rows = received_rows(config, mesh, coord, samples),
       .kept = kept_by(config.optimizer),
       .threads = std::max<int64_t>(1, config.run.threads),
       .depths = trains ? model.mtp.layers : 0,
       .micro_batches = trains ? batches_that_wait(config) : 1,
       .device = config.run.device_of_stage(coord[mesh::Axis::kPp])},
      trains ? std::optional<double>() : 0.0);
  if (trains) share_batch(config, mesh, samples, facts);
  return facts;
}

namespace {

MemoryPlan plan_of(const RunConfig& config, const mesh::DeviceMesh& mesh,
                   const program::Program& program,
                   const parallel::ModelUnits& model, const RunFacts& of_ranks,
                   int64_t rank, program::Purpose purpose) {
  const Facts facts = of_ranks.of(mesh.coord_of(rank), purpose);
  const program::Units units = model.units_of(mesh, rank);
  std::vector<int64_t> run;
  for (const auto& chunk : units.chunks) {
    run.insert(run.end(), chunk.begin(), chunk.end());
  }
  MemoryPlan plan;
  for (const auto& held : program::held_by(facts, run)) {
    const bool trains = purpose == program::Purpose::kTraining;
    const int64_t optimizer = trains ? held.optimizer_bytes : 0;
    const int64_t in_files =
        (units.offloads_states ? optimizer : 0) +
        (units.offloads_parameters ? held.parameter_bytes : 0);
    plan.in_files += in_files;
    plan.states +=
        (trains ? held.state_bytes() : held.parameter_bytes) - in_files;
    plan.optimizer += optimizer;
    plan.saved += held.parameter_bytes + optimizer;  // all versions of it
    if (trains && config.checkpoint.async && config.checkpoint.saves()) {
      plan.copies = plan.saved;
    }
  }
  plan.work =
      program::memory_of(program, model.units_of(mesh, rank, purpose), facts)
          .peak();
  return plan;
}

// Of the one rank around whose device 0 there are others: each holds a model,
// device 0 alone an optimizer.
MemoryPlan plan_of_devices(const MemoryPlan& device, int64_t devices) {
  MemoryPlan plan;
  plan.optimizer = device.optimizer;
  plan.saved = device.saved;
  plan.copies = device.copies;
  plan.states = devices * (device.states - device.optimizer) + device.optimizer;
  plan.work = devices * device.work;
  return plan;
}

}  // namespace

std::vector<MemoryPlan> memory_plans(const RunConfig& of,
                                     program::Purpose purpose) {
  // A device around device 0 holds what a rank of plain data parallelism does.
  RunConfig config = of;
  config.mesh.data_parallel = "ddp";
  const auto mesh = mesh_of(config, implied_world_size(config));
  const RunFacts facts(config, mesh);
  const auto units = parallel::model_units(facts.model(), mesh, config);
  std::vector<MemoryPlan> plans;
  for (int64_t stage = 0; stage < mesh.degree(mesh::Axis::kPp); ++stage) {
    mesh::Coord coord = mesh.coord_of(0);
    coord[mesh::Axis::kPp] = stage;
    const program::Program program =
        lowered_program(config, mesh, units, stage, purpose);
    plans.push_back(plan_of(config, mesh, program, units, facts,
                            mesh.rank_at(coord), purpose));
    if (config.batch.rows.empty()) continue;
    // The largest parts are there, but more samples may be elsewhere, or so few
    // that their rows wait.
    for (const int64_t other : ranks_by_samples(config, mesh, coord)) {
      plans.back().work = std::max(
          plans.back().work,
          plan_of(config, mesh, program, units, facts, other, purpose).work);
    }
  }
  if (of.mesh.star()) {
    return {plan_of_devices(plans.front(), mesh.world_size())};
  }
  return plans;
}

MemoryPlan memory_plan(const RunConfig& config) {
  const auto plans = memory_plans(config);
  return *std::ranges::max_element(plans, {}, &MemoryPlan::total);
}

namespace {

void add(const program::UnitFacts& unit, WholeModel::Parts& to) {
  for (const auto& each : unit.parameters) {
    const bool is_of_experts = each.data_axis == mesh::Axis::kExpertDp;
    WholeModel::Part& part = is_of_experts ? to.experts : to.others;
    part.elements += each.elements;
    part.trained += each.gradient_bytes > 0 ? each.elements : 0;
    part.parameter_bytes += each.parameter_bytes;
    part.optimizer_bytes += each.optimizer_bytes;
  }
}

}  // namespace

WholeModel whole_model(const RunConfig& config) {
  RunConfig alone = config;
  alone.tensor.sequence_parallel = false;
  const mesh::DeviceMesh one;
  const Facts facts = facts_of(alone, one, one.coord_of(0));
  WholeModel model;
  for (const auto& unit : facts.units) add(unit, model.all);
  for (int64_t block = 1; block <= config.model.num_blocks(); ++block) {
    auto& parts = model.blocks.emplace_back();
    for (const int64_t owner : facts.units[block].reads) {
      add(facts.units[owner], parts);
    }
  }
  return model;
}

int64_t checkpoint_bytes(const RunConfig& config) {
  const WholeModel model = whole_model(config);
  int64_t bytes = 0;
  for (const auto& part : {model.all.experts, model.all.others}) {
    bytes += part.parameter_bytes + part.optimizer_bytes;
  }
  return bytes;
}

}  // namespace tessera::engine
