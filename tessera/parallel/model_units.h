// What programs need to know of a model that was composed, for every rank of
// the mesh: a pure function of layouts, with no group and no memory.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"
#include "tessera/parallel/data/bundle.h"
#include "tessera/parallel/parallel_config.h"
#include "tessera/program/units.h"
#include "tessera/program/world.h"

namespace tessera::parallel {

// The kinds of groups over which ranks do something together.
class Lanes {
 public:
  explicit Lanes(const mesh::DeviceMesh& mesh) : mesh_(mesh) {}
  // Ranks that differ along these axes alone.
  int64_t along(const std::vector<mesh::Axis>& axes);
  // Those that share a bundle's gradients.
  int64_t peers_of(const data::Bundle& bundle);
  int64_t world();

  const std::vector<std::string>& names() const { return names_; }
  // See program::World.
  std::vector<int64_t> members(int64_t rank, int64_t lane) const;

 private:
  struct Kind {
    std::vector<mesh::Axis> axes = {};
    std::optional<mesh::Layout> layout = {};  // neither: all ranks
  };
  int64_t add(const std::string& name, Kind kind);
  mesh::DeviceMesh mesh_;
  std::vector<std::string> names_;
  std::vector<Kind> kinds_;
};

struct ModelUnits {
  // By unit, which owns them: all parameters of the model.
  std::vector<std::vector<nn::Parameter>> parameters;
  std::vector<std::vector<int64_t>> reads;  // by unit
  std::vector<int64_t> zero_stages;         // by unit
  // By stage and chunk: the units that run there.
  std::vector<std::vector<std::vector<int64_t>>> chunks;
  program::Placement placement = program::Placement::kRoundRobin;
  int64_t num_units = 0;    // that run: the first embeds, the last is the head
  std::set<int64_t> ahead;  // that run in steps alone
  ParallelConfig config;

  // Those of a unit's parameters that `rank` holds, as they travel.
  std::vector<data::Bundle> bundles(int64_t unit, const mesh::DeviceMesh& mesh,
                                    int64_t rank) const;
  program::Units units_of(
      const mesh::DeviceMesh& mesh, int64_t rank,
      program::Purpose purpose = program::Purpose::kTraining) const;
  // Of a unit's matrices, where they are updated whole, those that are cut.
  std::vector<data::MatrixPieces> matrices_in_pieces(
      int64_t unit, const mesh::DeviceMesh& mesh, int64_t rank) const;
  // Which activations are not kept.
  void set_recomputation(program::Units& units) const;
  // What gathers, reductions, sums and updates move.
  std::vector<program::UnitTransfers> transfers_of(const mesh::DeviceMesh& mesh,
                                                   int64_t rank,
                                                   Lanes& lanes) const;
};

}  // namespace tessera::parallel
