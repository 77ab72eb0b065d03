#include "tessera/checkpoint/checkpoint_config.h"

namespace tessera::checkpoint {

void CheckpointConfig::declare(config::Section& section) {
  section
      .key("every", every,
           "steps between checkpoints; 0: none, but where a run is stopped")
      .at_least(0)
      .at_most(1e12);
  section.key("keep", keep, "the newest checkpoints that stay; 0: all")
      .at_least(0)
      .at_most(1e12);
  section.key("keep_best", keep_best,
              "that of the lowest validation loss is written and stays too: "
              "the file `best` names it");
  section.key("async", async,
              "training goes on while they are written, from a copy in memory");
  section.key("dir", dir, "their folder; none: checkpoints/ in the run folder");
  section
      .key("local_every", local_every,
           "steps between checkpoints in the memory of hosts, with copies on "
           "the next one, to go on from where a rank or a host is lost; 0: "
           "none")
      .at_least(0)
      .at_most(1e12);
  section.key("local_dir", local_dir,
              "their folder, on each host one of its own, in memory or on a "
              "disk");
}

}  // namespace tessera::checkpoint
