// Which parameters of a unit travel together, and with whom: those of one type
// whose gradients are summed over the same ranks; a large one by itself, since
// it need not be packed then. A pure function of layouts, for any
// rank of the mesh; the storage of a rank and the proof of all programs read
// the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"
#include "tessera/parallel/data/cut.h"

namespace tessera::parallel::data {

struct Bundle {
  std::vector<nn::Parameter> parameters;
  at::ScalarType dtype = at::kFloat;  // of them, as they are updated
  int64_t stage = 0;                  // of ZeRO
  mesh::Axis axis;                    // along which ZeRO cuts
  std::vector<int64_t> shards;        // the ranks along it, ascending
  std::vector<int64_t> peers;         // further ranks that share the gradients
  std::string peers_name;             // the axes along which they lie
  Cut cut;                            // of the full parameters into shards
  bool is_frozen = false;             // without gradients
  bool in_files = false;              // where pieces of parameters lie

  // As nn::ParameterSpec has it.
  at::ScalarType type_in(at::ScalarType type) const {
    return parameters.front().spec->type_in(type);
  }
  // In stage 3 one rank, too, has its piece in files and apart from it, where
  // and while it computes, what it gathers.
  bool is_sharded() const {
    return (stage > 0 && shards.size() > 1) || (stage == 3 && in_files);
  }
  // Gradients live whole between instructions; else as shards.
  bool gradients_are_whole() const { return !is_sharded() || stage == 1; }
  // They are put where they stay, or some other rank takes part.
  bool is_reduced() const {
    return !is_frozen && (is_sharded() || peers.size() > 1);
  }
  // What was reduced over the shards has replicas beside.
  bool is_summed() const {
    return !is_frozen && is_sharded() && peers.size() > 1;
  }
};

// Elements of a rank's piece from which on a parameter travels alone: packing
// it takes longer than one collective more.
inline constexpr int64_t kAloneElements = 1 << 16;

// Whether ZeRO moves a parameter alone that is cut so.
bool travels_alone(const Cut& cut);

// Of the parameters of one unit that `rank` holds. `is_narrow`: the model's
// type, or that of gradients, which some do not have then (type_in()).
std::vector<Bundle> bundles_of(const std::vector<nn::Parameter>& unit,
                               const mesh::DeviceMesh& mesh, int64_t rank,
                               int64_t stage, bool is_narrow = false);

}  // namespace tessera::parallel::data
