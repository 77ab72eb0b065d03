#include "tessera/monitor/sink.h"

#include <exception>
#include <filesystem>

#include "tessera/core/error.h"
#include "tessera/monitor/console.h"
#include "tessera/monitor/json_lines.h"
#include "tessera/monitor/summary.h"
#include "tessera/monitor/tensorboard.h"

namespace tessera::monitor {

void Sinks::validated_at_start(const Validation& validation) {
  for (auto& sink : sinks_) sink->validated_at_start(validation);
}

void Sinks::step(const StepRecord& record) {
  for (auto& sink : sinks_) sink->step(record);
}

void Sinks::sync() {
  for (auto& sink : sinks_) sink->sync();
}

void Sinks::close(const RunEnd& end) {
  std::exception_ptr first;  // one that fails does not keep others from it
  for (auto& sink : sinks_) {
    try {
      sink->close(end);
    } catch (const Error&) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

std::unique_ptr<Sink> make_sinks(const MonitorConfig& config,
                                 const RunInfo& info) {
  std::error_code error;
  std::filesystem::create_directories(info.folder, error);
  TS_CHECK_IO(!error, "monitor: cannot make the run's folder ", info.folder,
              ": ", error.message(), ".");
  // Of an earlier end, which this start has left behind.
  std::filesystem::remove(info.folder + "/summary.json", error);
  const std::string metrics = info.folder + "/metrics.jsonl";
  truncate_after(metrics, info.first_step);
  const std::string samples = info.folder + "/samples.jsonl";
  truncate_after(samples, info.first_step);
  auto sinks = std::make_unique<Sinks>();
  sinks->add(std::make_unique<JsonLines>(metrics));
  if (config.sample > 0) sinks->add(std::make_unique<SampleLines>(samples));
  if (config.tensorboard) sinks->add(std::make_unique<TensorBoard>(info));
  sinks->add(std::make_unique<Summary>(info));
  sinks->add(std::make_unique<Console>(info, ConsoleOptions{config.every}));
  return sinks;
}

}  // namespace tessera::monitor
