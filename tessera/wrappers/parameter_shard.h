// The part of a parameter that a rank has: as checkpoints of modules
// (module_engine/sharded_checkpoint.h) know it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/layout.h"

namespace tessera::wrappers {

struct ParameterShard {
  std::string name;            // of an expert (moe.h) with its global number
  std::string name_here;       // the same with its number on this rank
  std::vector<int64_t> shape;  // of the whole; of a scalar {1}
  mesh::Box box;               // of the whole, that is here
  at::Tensor values;           // of box.size; live
  at::Tensor parameter;        // the same memory, as parameters() has it
  bool owned = true;           // on one of the ranks that hold this box
  // Of what fully_shard() gave alone.
  int64_t unit = 0;     // of units()
  mesh::Layout layout;  // an expert's: stacked over ep, as `parameter`
};

// Of a module that fully_shard() does not have: each parameter once, whole, or
// this rank's part where it is cut along tp. On several ranks nobody knows here
// which of them owns a box.
// Errors: TS_CHECK_CONFIG for experts that lie on several ranks, and for a
//         module that fully_shard() has.
std::vector<ParameterShard> shards_of(torch::nn::Module& module);

}  // namespace tessera::wrappers
