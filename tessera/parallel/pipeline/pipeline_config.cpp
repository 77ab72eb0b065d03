#include "tessera/parallel/pipeline/pipeline_config.h"

#include <algorithm>

#include "tessera/program/schedules/file.h"
#include "tessera/program/schedules/schedule.h"

namespace tessera::parallel::pipeline {

namespace schedules = program::schedules;

int64_t PipelineConfig::num_chunks() const {
  return chunks > 0 ? chunks
                    : schedules::usual_chunks(schedules::named(schedule));
}

program::Placement PipelineConfig::placement() const {
  return schedules::named(schedule).placement;
}

int64_t PipelineConfig::batches_of_a_unit(int64_t micro_batches) const {
  return placement() == program::Placement::kMirrored ? micro_batches / 2
                                                      : micro_batches;
}

program::Pipeline PipelineConfig::pipeline(int64_t stages) const {
  return {stages, num_chunks(), placement()};
}

// No file is, nor read for this.
bool PipelineConfig::delayed() const {
  return std::ranges::any_of(schedules::all(), [this](const auto& each) {
    return each.name == schedule && each.delayed;
  });
}

program::Versions PipelineConfig::versions(int64_t stages,
                                           int64_t stage) const {
  if (!delayed()) return {};
  return schedules::versions_of(schedules::named(schedule), stages, stage);
}

namespace {

std::string listed() {
  std::string names;
  for (const std::string& name : schedules::names()) {
    names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

std::string complaint_about(const std::string& schedule) {
  const auto known = schedules::names();
  if (std::ranges::count(known, schedule) > 0 ||
      schedules::names_file(schedule)) {
    return "";
  }
  const auto meant = config::nearest(schedule, known);
  return "it is none of " + listed() + ", nor a file that ends in .txt" +
         (meant ? ". Did you mean \"" + *meant + "\"?" : "");
}

}  // namespace

void PipelineConfig::declare(config::Section& section) {
  section
      .key("schedule", schedule,
           "order of forwards and backwards: one of " + listed() +
               ", or a file (.txt) with one")
      .check([](const config::Value& value) {
        return complaint_about(std::get<std::string>(value));
      });
  section
      .key("chunks", chunks,
           "stages that a rank holds; 0: two of the schedules that need two, "
           "else one")
      .at_least(0)
      .at_most(1 << 20);
  section.key("split", split,
              "layers of each part of the model, stage by stage; none: as cut "
              "says");
  section
      .key("cut", cut,
           "parts are balanced by layers, by facts (operations of embedding, "
           "layers and head), or by what these took in a run's folder with "
           "monitor.trace")
      .check([](const config::Value& value) -> std::string {
        return std::get<std::string>(value).empty()
                   ? "it is empty: use layers, facts, or the folder of a run"
                   : "";
      });
  section
      .key("order", order,
           "of gpipe's backwards: the last micro-batch first, or the first")
      .one_of({"reverse", "forward"});
}

}  // namespace tessera::parallel::pipeline
