#include "tessera/parallel/expert/expert_config.h"

namespace tessera::parallel::expert {

void ExpertConfig::declare(config::Section& section) {
  section
      .key("dispatch_chunks", dispatch_chunks,
           "parts in which tokens go to experts on other ranks, which compute "
           "with one, and shared experts, while others travel; 0: all at "
           "once, and ranks wait for them; -1: 2, but 0 where all ranks share "
           "memory, whose cores do both")
      .at_least(-1)
      .at_most(1 << 10);
}

// Over shared memory rows are moved by the cores that would compute.
ExpertConfig ExpertConfig::resolved(bool ranks_share_memory) const {
  ExpertConfig config = *this;
  if (dispatch_chunks < 0) config.dispatch_chunks = ranks_share_memory ? 0 : 2;
  return config;
}

}  // namespace tessera::parallel::expert
