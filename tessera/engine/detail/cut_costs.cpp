#include "tessera/engine/detail/cut_costs.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/engine/detail/traced_cut.h"
#include "tessera/engine/memory_plan.h"

namespace tessera::engine::detail {

using mesh::Axis;
using parallel::pipeline::UnitCosts;

namespace {

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

CutCosts costs_by_run(const RunConfig& config, const mesh::DeviceMesh& mesh) {
  const UnitSeconds seconds = seconds_of_run(config, mesh.world_size());
  const bool same_world = std::ssize(seconds) == mesh.world_size();
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

}  // namespace

CutCosts cut_costs(const RunConfig& config, const mesh::DeviceMesh& mesh) {
  if (config.pipeline.cuts_by_run()) return costs_by_run(config, mesh);
  return {.units = config.pipeline.cut == "facts"
                       ? costs_by_facts(config, mesh)
                       : costs_by_layers(config.model.layers),
          .speeds = config.mesh.speeds};
}

std::vector<double> with_head(std::vector<double> by_unit, int64_t layers) {
  const auto ahead = by_unit.begin() + layers + 1;
  by_unit.back() = std::accumulate(ahead, by_unit.end(), 0.0);
  by_unit.erase(ahead, by_unit.end() - 1);
  return by_unit;
}

}  // namespace tessera::engine::detail
