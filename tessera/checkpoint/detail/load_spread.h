// Reading a checkpoint of whose files each of several hosts has some.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/group.h"

namespace tessera::checkpoint::detail {

struct SpreadFiles {
  Manifest manifest;  // the same on every rank
  // Collective: afterwards the folder has what this rank needs of the
  // manifest's files. "" or a complaint, the same on every rank.
  std::function<std::string(const std::vector<bool>& needed)> fetch;
};

// In load.cpp. Fills the state from `folder`, which is each host's own. "" when
// it was filled; else what is wrong with the checkpoint, the same on every
// rank. Throws as load() does where it is of another model.
std::string load_spread(const std::string& folder, State& state,
                        comm::Group& world, const SpreadFiles& files);

}  // namespace tessera::checkpoint::detail
