// What a rank of fully_shard() holds of a module, as numbers: the trainer's
// facts of parameters (parallel/data/parameter_facts.h), and the trainer's walk
// over programs (program/memory.h).
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/parallel/data/bundle.h"
#include "tessera/program/facts.h"
#include "tessera/wrappers/detail/pass_programs.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/sharded_memory.h"

namespace tessera::wrappers {

struct MemoryFacts {
  program::Facts owners;  // of parameters alone: what is computed is not known
  int64_t trained_elements = 0;  // of shards
  // Of shards' .grad, where it is of another type than what was reduced.
  int64_t copied_gradient_bytes = 0;
};

// `owners`: the bundles of each, as `rank` holds them.
MemoryFacts memory_facts(
    const std::vector<std::vector<parallel::data::Bundle>>& owners,
    const mesh::DeviceMesh& mesh, int64_t rank,
    const FullyShardOptions& options);

// `state_bytes`: that an optimizer keeps of an element.
ShardedMemory sharded_memory(const MemoryFacts& facts,
                             const PassPrograms& programs, int64_t state_bytes);

}  // namespace tessera::wrappers
