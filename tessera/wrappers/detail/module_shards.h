// The parameters of a user's module as a rank of fully_shard() has them: units,
// shards in the place of parameters, whole tensors in the members of classes.
#pragma once

#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/parallel/data/sharded_parameters.h"
#include "tessera/program/units.h"
#include "tessera/wrappers/detail/heard_memory.h"
#include "tessera/wrappers/detail/memory_facts.h"
#include "tessera/wrappers/detail/module_units.h"
#include "tessera/wrappers/fully_shard.h"

namespace tessera::wrappers {

// Modules whose parameters are shards: their own and their children's.
class ShardedModules {
 public:
  // Refuses a module of which some part is there.
  explicit ShardedModules(torch::nn::Module& module);
  ~ShardedModules();
  ShardedModules(const ShardedModules&) = delete;
  ShardedModules& operator=(const ShardedModules&) = delete;

  // Ranks, this one too, whose parameters() are other shards; none: whole ones.
  void set_ranks(std::vector<int64_t> ranks);
  const std::vector<int64_t>& ranks() const { return ranks_; }

 private:
  std::vector<const torch::nn::Module*> modules_;
  std::vector<int64_t> ranks_;
};

// Whether this one is among them.
bool is_sharded(const torch::nn::Module& module);
// Those of ShardedModules; none of one that is not among them.
std::vector<int64_t> ranks_with_shards(const torch::nn::Module& module);

class ModuleShards {
 public:
  // Takes the values of rank 0 of `data`, the ranks that see other data, and
  // puts shards where the module has parameters.
  // Errors: what fully_shard.h says of options, mesh and module.
  ModuleShards(torch::nn::Module& module, const mesh::DeviceMesh& mesh,
               comm::Communicator& ranks, comm::Group& data,
               const FullyShardOptions& options);

  parallel::data::ShardedParameters& parameters() { return *parameters_; }
  // By unit, the module itself first.
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<program::Unit>& owners() const { return owners_; }
  std::vector<int64_t> stages() const;
  // In the order of parameters().parameters().
  const std::vector<at::Tensor>& whole() const { return whole_; }
  const std::vector<at::Tensor>& shards() const { return shards_; }
  // Of these, in the order of parameters().trained().
  const std::vector<size_t>& trained() const { return trained_; }
  // Whether the i-th of all was, when the module was sharded.
  bool is_trained(size_t i) const {
    return std::ranges::binary_search(trained_, i);
  }

  const MemoryFacts& memory() const { return memory_; }
  // Of the rank at `coord`: as checkpoints have them.
  std::vector<ParameterShard> local_shards(const mesh::DeviceMesh& mesh,
                                           const mesh::Coord& coord) const;

  // Whole parameters and gradients, with the follower's tags.
  void hear(HeardMemory& memory);
  // Of what is heard: the number, among those that are trained.
  std::optional<size_t> whose_gradient(const at::Tensor& gradient) const;
  // False where a shard got other memory, as by to().
  bool are_in_place() const;
  // Whether the module's parameters() are whole for now.
  void set_gathered(bool is_gathered);
  // Whether the i-th that is trained counts on this rank in a norm.
  bool counts(size_t trained, const mesh::Coord& coord) const;
  bool has_experts() const { return num_expert_ranks() > 1; }

 private:
  // Of a parameter: with its expert's number among all, where it is of one.
  std::string global_name(const std::string& name) const;
  void find_experts(torch::nn::Module& module, const mesh::DeviceMesh& mesh,
                    int64_t rank);
  int64_t stage_of(const ModuleUnit& unit,
                   const FullyShardOptions& options) const;
  bool is_within_experts(const std::string& name) const;
  // Of experts that lie on several ranks, as all do then.
  bool is_of_expert(const std::string& name) const;
  int64_t num_expert_ranks() const {
    return experts_.empty() ? 1 : experts_.begin()->second.ranks;
  }
  void describe(const nn::Parameter& parameter, const mesh::DeviceMesh& mesh,
                int64_t rank, int64_t stage) const;
  void lay_out(torch::nn::Module& module, const std::vector<ModuleUnit>& units,
               const mesh::DeviceMesh& mesh, comm::Communicator& ranks,
               comm::Group& data, const FullyShardOptions& options);
  void put_shards(torch::nn::Module& module);
  std::vector<int64_t> shard_ranks(const mesh::DeviceMesh& mesh, int64_t rank,
                                   const FullyShardOptions& options) const;

  ShardedModules modules_;
  std::vector<int64_t> ranks_;  // with other shards of the same
  std::vector<std::string> names_;
  std::vector<program::Unit> owners_;
  MemoryFacts memory_;
  // By name of a module of LocalExperts: their ranks, as many of each, and the
  // number of the first expert here.
  struct ExpertPlace {
    int64_t ranks = 1, first = 0;
  };
  std::map<std::string, ExpertPlace> experts_;
  std::unique_ptr<parallel::data::ShardedParameters> parameters_;
  std::vector<at::Tensor> whole_, shards_;
  std::vector<size_t> trained_;
  // Gradients share memory: where one begins, and its elements, for one without
  // any begins where the next does.
  using Place = std::tuple<const c10::StorageImpl*, int64_t, int64_t>;
  static Place place_of(const at::Tensor& gradient);
  std::map<Place, size_t> gradients_;
};

}  // namespace tessera::wrappers
