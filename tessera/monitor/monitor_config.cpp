#include "tessera/monitor/monitor_config.h"

namespace tessera::monitor {

void MonitorConfig::declare(config::Section& section) {
  section
      .key("every", every,
           "steps between progress lines; metrics.jsonl has every step")
      .at_least(1)
      .at_most(1e12);
  section.key("tensorboard", tensorboard, "write events for TensorBoard");
  section
      .key("trace", trace,
           "steps, from the second on, of which every instruction is traced; "
           "0: none")
      .at_least(0)
      .at_most(1e6);
}

}  // namespace tessera::monitor
