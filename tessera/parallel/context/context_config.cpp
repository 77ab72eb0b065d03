#include "tessera/parallel/context/context_config.h"

namespace tessera::parallel::context {

void ContextConfig::declare(config::Section& section) {
  section.key("method", method, "how attention sees a sequence that is cut")
      .one_of({"ring", "ulysses", "allgather"});
}

}  // namespace tessera::parallel::context
