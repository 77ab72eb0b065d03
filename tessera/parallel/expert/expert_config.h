// The section expert of the configuration.
#pragma once

#include <cstdint>

#include "tessera/core/config.h"

namespace tessera::parallel::expert {

struct ExpertConfig {
  int64_t dispatch_chunks = -1;  // -1: 2, over shared memory alone 0
  void declare(config::Section& section);

  // With what -1 stands for in its place.
  ExpertConfig resolved(bool ranks_share_memory) const;
};

}  // namespace tessera::parallel::expert
