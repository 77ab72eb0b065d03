#include "tessera/parallel/recompute_config.h"

namespace tessera::parallel {

void RecomputeConfig::declare(config::Section& section) {
  section.key("mode", mode, "activations that backward computes again")
      .one_of({"none", "selective", "block", "stage", "minimal"})
      .not_built({"selective", "stage", "minimal"}, "this mode", "block");
  section.key("every", every, "every n-th block is recomputed")
      .at_least(1)
      .at_most(1 << 24);
}

}  // namespace tessera::parallel
