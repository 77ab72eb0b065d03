#include "tessera/parallel/recompute_config.h"

namespace tessera::parallel {

void RecomputeConfig::declare(config::Section& section) {
  section
      .key(
          "mode", mode,
          "activations that backward computes again: those inside of attention "
          "(selective), of each block, of a whole stage, or of a stage anew "
          "for each of its layers, which keeps one layer's alone (minimal: "
          "n^2 / 2 forwards for n layers)")
      .one_of({"none", "selective", "block", "stage", "minimal"});
  section
      .key("every", every,
           "of mode block: each n-th one; of mode stage: n blocks at a time, "
           "from the input of their first; 0: each block, the whole stage")
      .at_least(0)
      .at_most(1 << 24);
}

}  // namespace tessera::parallel
