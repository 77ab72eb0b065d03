// A model's parameters and gradients on one rank, unit by unit, each in its own
// stage of ZeRO: stage 0 is plain data parallelism.
//
// Layouts: what is sharded on dp_shard (of experts: on expert_dp, here always
//          meant too, as expert_replicate is with dp_replicate) is cut in boxes
//          on dim 0 inside what tensor parallelism left (cut.h; FSDP2's cut).
//          This rank updates its box, the "shard"; layers compute with the
//          whole, "full", parameter.
// Where:   stage    full parameters      gradients
//          0        always               whole; reduced once a step
//          1        once gathered, until whole; reduced once a step
//                   the shards change
//          2        as 1                 shards; whole while a unit's backward
//                                        runs, reduced behind it
//          3        while gathered       as 2
// Versions: of a program's (program/units.h), counted from that of the step
//          that runs; what layers compute with and backwards add to is that of
//          use(). Shards are the newest's, gradients those of the step that
//          runs.
// Comm:    parameter_storage.h, gradient_storage.h; a rank calls the functions
//          in the order of its program.
// Threads: as comm::Group: one thread a rank.
// Source:  Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv
//          2304.11277.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/device.h"
#include "tessera/nn/parameter.h"
#include "tessera/parallel/data/bundle.h"
#include "tessera/parallel/data/gradient_storage.h"
#include "tessera/program/units.h"

namespace tessera::parallel::data {

// A parameter as this rank trains it.
struct LocalParameter {
  std::string name;
  mesh::Layout layout;
  at::Tensor shard;     // the box that the layout gives this rank
  at::Tensor gradient;  // of the shard, once reduced; where there are any
  int64_t unit = 0;
  bool balances_load = false;  // as nn::ParameterSpec has it
};

// Sets what the data axes mean for this parameter: stage 0 replicates it over
// dp_replicate and dp_shard, whose gradients are summed; from stage 1 on
// dp_shard cuts it.
void set_layout(const nn::Parameter& parameter, int64_t stage);

using UnitMemory = std::function<at::Tensor(int64_t unit, at::IntArrayRef sizes,
                                            at::ScalarType type)>;

class ShardedParameters {
 public:
  // Takes over memory and .grad of the parameters, which are materialised as
  // their layouts say. units[u]: those of unit u that this rank holds. Without
  // options there are no gradients, and nothing of theirs is to be called.
  // `full`: type and device of full parameters, where they are others than the
  // shards'. `memory`: for what stays of a unit's parameters that are cut;
  // null: the groups'.
  ShardedParameters(std::vector<std::vector<Bundle>> units,
                    comm::Communicator& ranks,
                    const std::optional<GradientOptions>& options,
                    const at::TensorOptions& full = {},
                    const UnitMemory& memory = nullptr,
                    const program::Versions& versions = {});
  ~ShardedParameters();
  ShardedParameters(const ShardedParameters&) = delete;
  ShardedParameters& operator=(const ShardedParameters&) = delete;

  // In the order of the units.
  const std::vector<LocalParameter>& parameters() const { return parameters_; }
  // Those that are not frozen.
  const std::vector<LocalParameter>& trained() const { return trained_; }
  // The tensors that layers compute with, of this unit's own parameters.
  std::vector<at::Tensor> full(int64_t unit) const;

  // Full parameters from everybody's shards (stages 1 to 3), and away again
  // (stage 3).
  void begin_gather(int64_t unit, comm::Mode mode, int64_t version = 0);
  void await_gather(int64_t unit, int64_t version = 0);
  void free(int64_t unit, int64_t version = 0);
  // The newest, all at once, and in use: for who reads parameters outside of a
  // program.
  void gather_all();

  // Of this unit's own parameters.
  void use(int64_t unit, int64_t version);
  // See ParameterStorage.
  void keep(int64_t unit);
  void next_version();
  void make_versions_alike();
  // In the order of parameters(): the shards of the version of the step that
  // runs. REQUIRES: two versions, all alive.
  at::Tensor shard_of_step(size_t parameter) const;
  // By parameter, behind gather_all(): whole, in the shards' type; and every
  // rank's shards from these, which somebody wrote to.
  std::vector<at::Tensor> full_masters();
  void take(const std::vector<at::Tensor>& full_masters);

  void zero_gradients(int64_t version = 0);
  // Before anybody reads gradients of which no reduction was begun.
  void complete_gradients(int64_t version = 0);
  // Whole gradients of the unit, before a backward that adds to them.
  void allocate_gradients(int64_t unit, int64_t version = 0);
  void begin_reduction(int64_t unit, comm::Mode mode, int64_t version = 0);
  void await_reduction(int64_t unit, int64_t version = 0);
  void begin_sum(int64_t unit, comm::Mode mode, int64_t version = 0);
  void await_sum(int64_t unit, int64_t version = 0);

 private:
  struct Held;
  void for_all(const auto& act);
  const program::Versions versions_;
  int64_t steps_ = 0;  // that next_version() ended
  // By unit: the version in use, counted from the first; none: not known.
  std::vector<std::optional<int64_t>> used_;
  SentCopies sent_;  // by gathers
  std::vector<std::vector<std::unique_ptr<Held>>> units_;
  std::vector<LocalParameter> parameters_, trained_;
};

}  // namespace tessera::parallel::data
