#include "tessera/parallel/model_units.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "tessera/comm/flat_gradients.h"
#include "tessera/models/hidden_matrix.h"

namespace tessera::parallel {

using mesh::Axis;

int64_t Lanes::add(const std::string& name, Kind kind) {
  const auto known = std::ranges::find(names_, name);
  if (known != names_.end()) return known - names_.begin();
  names_.push_back(name);
  kinds_.push_back(std::move(kind));
  return static_cast<int64_t>(names_.size()) - 1;
}

int64_t Lanes::along(const std::vector<Axis>& axes) {
  std::string name;
  for (Axis axis : axes) {
    name += std::string(name.empty() ? "" : " ") + mesh::name_of(axis);
  }
  return add(name, {.axes = axes});
}

// Neighbours along an axis that share a copy are fewer than the axis has.
int64_t Lanes::peers_of(const data::Bundle& bundle) {
  const auto& layout = bundle.parameters.front().spec->layout;
  // Pairs of stages that hold the same are groups of their own.
  std::set<int64_t> stages;
  for (int64_t peer : bundle.peers) {
    stages.insert(mesh_.coord_of(peer)[Axis::kPp]);
  }
  std::string of_stages;
  for (int64_t stage : stages) {
    if (stages.size() > 1) of_stages += c10::str(" ", stage);
  }
  return add(
      c10::str(bundle.peers_name, of_stages, " (", bundle.peers.size(), ")"),
      {.layout = layout});
}

int64_t Lanes::world() { return add("world", {}); }

std::vector<int64_t> Lanes::members(int64_t rank, int64_t lane) const {
  const Kind& kind = kinds_.at(lane);
  if (!kind.axes.empty()) {
    std::vector<mesh::DeviceMesh::Along> along;
    for (Axis axis : kind.axes) {
      std::vector<int64_t> coords(mesh_.degree(axis));
      std::iota(coords.begin(), coords.end(), 0);
      along.push_back({axis, std::move(coords)});
    }
    return mesh_.ranks_at(mesh_.coord_of(rank), along);
  }
  if (kind.layout) {
    if (!kind.layout->held_by(mesh_.coord_of(rank))) return {rank};
    return kind.layout->gradient_peers(mesh_, rank);
  }
  std::vector<int64_t> all(mesh_.world_size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<data::Bundle> ModelUnits::bundles(int64_t unit,
                                              const mesh::DeviceMesh& mesh,
                                              int64_t rank) const {
  std::vector<nn::Parameter> held;
  for (const auto& parameter : parameters.at(unit)) {
    if (parameter.spec->layout.held_by(mesh.coord_of(rank))) {
      held.push_back(parameter);
    }
  }
  auto bundles = data::bundles_of(held, mesh, rank, zero_stages.at(unit),
                                  config.precision.is_narrow());
  for (auto& each : bundles) each.in_files = config.zero.offloads_parameters();
  return bundles;
}

program::Units ModelUnits::units_of(const mesh::DeviceMesh& mesh, int64_t rank,
                                    program::Purpose purpose) const {
  const int64_t stage = mesh.coord_of(rank)[Axis::kPp];
  const auto item =
      static_cast<int64_t>(c10::elementSize(config.precision.compute_dtype()));
  program::Units units;
  units.chunks = chunks.at(stage);
  if (purpose == program::Purpose::kEvaluation) {
    for (auto& chunk : units.chunks) {
      std::erase_if(chunk, [&](int64_t unit) { return ahead.contains(unit); });
    }
  }
  units.reshard_after_forward = config.zero.reshard_after_forward;
  units.prefetch = config.zero.prefetch;
  units.alone = mesh.world_size() == 1;
  units.minimal = config.recompute.mode == "minimal";
  units.versions = config.pipeline.versions(mesh.degree(Axis::kPp), stage);
  units.offloads_states = config.zero.offloads();
  units.offloads_parameters = config.zero.offloads_parameters();
  for (size_t unit = 0; unit < parameters.size(); ++unit) {
    const auto id = static_cast<int64_t>(unit);
    program::Unit each{.reads = reads[unit],
                       .zero_stage = zero_stages[unit],
                       .reduced = false,
                       .trained = false,
                       .ahead = ahead.contains(id)};
    for (const auto& bundle : bundles(id, mesh, rank)) {
      // Who holds a shard of what is frozen takes part, with nothing to give.
      each.reduced |= bundle.is_reduced() || bundle.is_sharded();
      each.summed |= bundle.is_summed();
      each.trained |= !bundle.is_frozen;
      each.across_stages |=
          !bundle.is_frozen && !bundle.is_sharded() &&
          std::ranges::any_of(bundle.peers, [&](int64_t peer) {
            return mesh.coord_of(peer)[Axis::kPp] != stage;
          });
      if (bundle.is_sharded()) {
        each.bytes += bundle.cut.numel() * bundle.cut.ranks() * item;
      }
    }
    each.whole_updates = !matrices_in_pieces(id, mesh, rank).empty();
    units.all.push_back(std::move(each));
  }
  set_recomputation(units);
  return units;
}

std::vector<data::MatrixPieces> ModelUnits::matrices_in_pieces(
    int64_t unit, const mesh::DeviceMesh& mesh, int64_t rank) const {
  std::vector<data::MatrixPieces> found;
  if (!config.whole_matrices) return found;
  for (const auto& parameter : parameters.at(unit)) {
    const nn::ParameterSpec& spec = *parameter.spec;
    if (spec.is_frozen || !models::is_hidden_matrix(spec, num_units) ||
        !spec.layout.held_by(mesh.coord_of(rank))) {
      continue;
    }
    auto pieces = data::pieces_of(spec.layout, mesh, rank);
    if (pieces.is_cut()) found.push_back(std::move(pieces));
  }
  return found;
}

// The last unit's backward comes right behind its forward: of minimal it keeps
// its activations, which are those of a norm.
void ModelUnits::set_recomputation(program::Units& units) const {
  const std::string& mode = config.recompute.mode;
  const int64_t last = num_units - 1, every = config.recompute.every;
  for (const auto& chunk : units.chunks) {
    int64_t from = chunk.front(), blocks = 0;
    for (const int64_t unit : chunk) {
      const bool is_block = unit > 0 && unit < last;
      auto& start = units.all[unit].recomputed_from;
      if (mode == "block" && is_block && config.recompute.covers(unit - 1)) {
        start = unit;
      }
      if (mode == "selective" && is_block) {
        start = unit;
        units.all[unit].attention_alone = true;
      }
      if (mode == "stage") {
        const bool starts = every > 0 && is_block && blocks > 0;
        if (starts && blocks % every == 0) from = unit;
        start = from;
      }
      if (mode == "minimal" && unit != last) start = from;
      blocks += is_block ? 1 : 0;
    }
  }
}

std::vector<program::UnitTransfers> ModelUnits::transfers_of(
    const mesh::DeviceMesh& mesh, int64_t rank, Lanes& lanes) const {
  std::vector<program::UnitTransfers> all(parameters.size());
  for (size_t unit = 0; unit < parameters.size(); ++unit) {
    program::UnitTransfers& each = all[unit];
    for (const auto& bundle : bundles(static_cast<int64_t>(unit), mesh, rank)) {
      const at::ScalarType weight =
          bundle.type_in(config.precision.compute_dtype());
      const at::ScalarType reduced =
          bundle.type_in(config.precision.gradient_dtype());
      const int64_t piece = bundle.cut.numel();
      const bool travels = bundle.is_sharded() && bundle.cut.ranks() > 1;
      if (bundle.is_frozen) {
        if (!travels) continue;
        each.gather.push_back(
            {"all_gather", lanes.along({bundle.axis}), weight, piece});
        continue;
      }
      if (!bundle.is_reduced()) continue;
      const int64_t peers = lanes.peers_of(bundle);
      if (!bundle.is_sharded()) {
        const int64_t most = comm::elements_of_bucket(
            config.zero.bucket_bytes(), piece,
            static_cast<int64_t>(c10::elementSize(reduced)));
        for (int64_t begin = 0; begin < piece; begin += most) {
          each.reduce.push_back(
              {"all_reduce", peers, reduced, std::min(most, piece - begin)});
        }
        continue;
      }
      if (travels) {
        const int64_t shards = lanes.along({bundle.axis});
        each.gather.push_back({"all_gather", shards, weight, piece});
        each.reduce.push_back(
            {"reduce_scatter", shards, reduced, piece * bundle.cut.ranks()});
      }
      if (bundle.is_summed()) {
        each.sum.push_back({"all_reduce", peers, reduced, piece});
      }
    }
    // Those that are cut along the same axes travel together.
    std::vector<std::pair<std::vector<Axis>, int64_t>> sent;
    for (const auto& pieces :
         matrices_in_pieces(static_cast<int64_t>(unit), mesh, rank)) {
      auto found = std::ranges::find(sent, pieces.axes,
                                     &decltype(sent)::value_type::first);
      if (found == sent.end()) found = sent.insert(found, {pieces.axes, 0});
      found->second += pieces.numel;
    }
    for (const auto& [axes, piece] : sent) {
      each.updates.push_back(
          {"all_gather", lanes.along(axes), config.updates().dtype, piece});
    }
  }
  return all;
}

}  // namespace tessera::parallel
