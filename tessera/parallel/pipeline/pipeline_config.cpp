#include "tessera/parallel/pipeline/pipeline_config.h"

#include "tessera/program/schedules/schedule.h"

namespace tessera::parallel::pipeline {

void PipelineConfig::declare(config::Section& section) {
  const std::vector<std::string> not_built = {"zb_h1", "zb_v", "dualpipe"};
  auto choices = program::schedules::names();
  choices.insert(choices.end(), not_built.begin(), not_built.end());
  section.key("schedule", schedule, "order of forwards and backwards")
      .one_of(choices)
      .not_built(not_built, "this schedule", "1f1b");
  section.key("chunks", chunks, "stages that a rank holds")
      .at_least(1)
      .at_most(1 << 20);
  section.key("split", split, "layers of each stage; none: evenly");
}

}  // namespace tessera::parallel::pipeline
