#include "tessera/comm/comm_config.h"

namespace tessera::comm {

void CommConfig::declare(config::Section& section) {
  section
      .key("backend", backend,
           "what carries the collectives; auto: shm inside one host, gloo over "
           "several")
      .one_of({"auto", "shm", "gloo", "mpi", "nccl"})
      .not_built({"mpi", "nccl"}, "the backend", "auto, shm or gloo");
  section.key("algorithm", algorithm, "how a collective goes through its ranks")
      .one_of({"auto", "ring", "tree", "hierarchical"})
      .not_built({"ring", "tree", "hierarchical"}, "a choice of algorithm",
                 "auto");
  section
      .key("timeout_s", timeout_s,
           "seconds after which an operation that waits for a peer fails")
      .at_least(1)
      .at_most(7 * 24 * 3600);
}

}  // namespace tessera::comm
