// The section context of the configuration.
#pragma once

#include <string>

#include "tessera/core/config.h"

namespace tessera::parallel::context {

struct ContextConfig {
  std::string method = "ring";
  void declare(config::Section& section);
};

}  // namespace tessera::parallel::context
