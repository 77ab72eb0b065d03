// What ranks have of one model, put together: whole modules, their parts along
// tp, shards of fully_shard(), stages of a pipeline. Which rank writes what
// several hold follows from what each says that it has.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/group.h"
#include "tessera/wrappers/parameter_shard.h"

namespace tessera::detail {

struct ModulePart {
  const torch::nn::Module* module = nullptr;
  std::vector<wrappers::ParameterShard> shards;
  int64_t stage = 0;  // of a pipeline
};

class ModuleParts {
 public:
  // Comm: an all_reduce of a number, and an all_gather of three a tensor.
  // Errors: TS_CHECK_CONFIG, on every rank alike, for a name that two stages
  //         have.
  ModuleParts(std::vector<ModulePart> here, comm::Group& world);

  // Of all parts, `owned` on one of the ranks that hold the same box: another
  // one from box to box, so that they write side by side.
  const std::vector<wrappers::ParameterShard>& shards() const {
    return shards_;
  }
  // Whether this rank is the first that has the i-th of these.
  bool is_first(size_t shard) const { return is_first_[shard]; }
  // "model.NAME" of every parameter and buffer.
  std::vector<checkpoint::TensorEntry> entries() const;

 private:
  std::vector<ModulePart> parts_;
  std::vector<wrappers::ParameterShard> shards_;
  std::vector<bool> is_first_;                 // by shard
  std::map<std::string, bool> writes_buffer_;  // by name
};

}  // namespace tessera::detail
