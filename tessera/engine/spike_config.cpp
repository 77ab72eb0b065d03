#include "tessera/engine/spike_config.h"

namespace tessera::engine {

void SpikeConfig::declare(config::Section& section) {
  constexpr int64_t kMostBatches = 1'000'000;
  section
      .key("action", action,
           "what a step with such a loss does: warn: a line in the log; "
           "rewind: the run goes back to a checkpoint before it, and on "
           "without the batches around it; so it does where one gradient that "
           "is not finite would end the run")
      .one_of({"none", "warn", "rewind"});
  section
      .key("window", window,
           "losses before it that a loss is compared with, once there are so "
           "many")
      .at_least(8)
      .at_most(10'000);
  section
      .key("deviations", deviations,
           "by which it lies above their median; one is 1.4826 times their "
           "median absolute deviation, and at least 1% of the median and 0.001")
      .at_least(1)
      .at_most(1e6);
  section
      .key("skip_before", skip_before,
           "of rewind: batches before that of the spike which are left out "
           "too; the checkpoint is the newest that lies before them, else the "
           "oldest there is")
      .at_least(0)
      .at_most(kMostBatches);
  section.key("skip_after", skip_after, "of rewind: batches behind it")
      .at_least(0)
      .at_most(kMostBatches);
  section
      .key("max_rewinds", max_rewinds,
           "of rewind: times that the run goes back; the spike behind them "
           "ends it")
      .at_least(1)
      .at_most(1000);
}

}  // namespace tessera::engine
