// A model's parameters and gradients on one rank, unit by unit, each in its own
// stage of ZeRO: stage 0 is plain data parallelism.
//
// Layouts: what is sharded on dp_shard (of experts: on expert_dp, here always
//          meant too) is cut in boxes on dim 0 (of experts: on dim 1) inside
//          what tensor parallelism left, uneven and empty ones included
//          (FSDP2's cut). This rank
//          updates its box, the "shard"; layers compute with the whole, "full",
//          parameter.
// Where:   stage    full parameters      gradients
//          0, 1     always               whole; reduced once a step
//          2        always               shards; whole while a unit's backward
//                                        runs, reduced behind it
//          3        while gathered       as 2
//          In 1 and 2 a shard is a view of the full parameter.
// Comm:    gather(): all_gather over dp_shard. reduce(): reduce_scatter(sum)
//          over dp_shard, and in await() one all_reduce(sum) of the shard over
//          the other ranks that Layout::gradient_peers names; of what is not
//          sharded all_reduce(sum) alone, in pieces of bucket_bytes. With P
//          bytes of parameters, G of gradients and N ranks a rank sends (N-1)/N
//          of: G for a reduce_scatter, P for an all_gather, 2 G for an
//          all_reduce.
// Types:   gradients are accumulated and reduced in the type that is asked for:
//          of half-precision parameters in fp32, or like them to save memory.
// Memory:  booked as parameters and gradients (core/memory_kind.h).
// Order:   a rank calls the functions in the order of its program; on shm sums
//          are in rank order, and no bucket size changes a bit.
// Threads: as comm::Group: one thread a rank.
// Source:  Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv
//          2304.11277.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

namespace tessera::parallel::data {

// A parameter as this rank trains it.
struct LocalParameter {
  std::string name;
  mesh::Layout layout;
  at::Tensor shard;     // the box that the layout gives this rank
  at::Tensor gradient;  // of the shard, once reduced
};

// Sets what the data axes mean for this parameter: stage 0 replicates it over
// dp_replicate, dp_shard and cp, whose gradients are summed; from stage 1 on
// dp_shard cuts it. The data axis of an expert is expert_dp.
void set_layout(const nn::Parameter& parameter, int64_t stage);

struct ShardingOptions {
  std::vector<int64_t> stages;  // by unit
  // In which gradients are accumulated and summed over ranks.
  at::ScalarType gradient_dtype = at::kFloat;
  int64_t bucket_bytes = int64_t{25} << 20;
};

class ShardedParameters {
 public:
  // Takes over memory and .grad of the parameters, which are materialised as
  // their layouts say. units[u]: those of unit u that this rank holds, all
  // with the same data axis; each once.
  ShardedParameters(std::vector<std::vector<nn::Parameter>> units,
                    const mesh::DeviceMesh& mesh, comm::Communicator& ranks,
                    const ShardingOptions& options);
  ~ShardedParameters();
  ShardedParameters(const ShardedParameters&) = delete;
  ShardedParameters& operator=(const ShardedParameters&) = delete;

  // In the order of the units.
  const std::vector<LocalParameter>& parameters() const;

  // Full parameters from everybody's shards, and away again (stage 3).
  void gather(int64_t unit);
  void free(int64_t unit);
  // After the shards were changed from outside (a checkpoint was loaded).
  void gather_all();

  void zero_gradients();
  // Before a backward that adds to the gradients of this unit.
  void begin_backward(int64_t unit);
  // Begins the reduction of the unit's gradients; await() ends them all.
  void reduce(int64_t unit);
  void await();

 private:
  class Group;
  static void end(std::vector<Group*>& pending);
  std::vector<std::vector<std::unique_ptr<Group>>> units_;
  std::vector<LocalParameter> parameters_;
  std::vector<int64_t> stages_;  // by unit
  // Reductions begun and not ended, of gradients that live as shards or whole.
  std::vector<Group*> into_shards_, whole_;
};

}  // namespace tessera::parallel::data
