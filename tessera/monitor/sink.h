// Where records go. Only rank 0 has sinks.
//
// Order:  validated_at_start? step* close. A sink that was never closed leaves
//         what it wrote so far readable.
// Errors: TS_CHECK_IO names the file.
// Threads: one.
#pragma once

#include <memory>
#include <vector>

#include "tessera/monitor/monitor_config.h"
#include "tessera/monitor/step_record.h"

namespace tessera::monitor {

class Sink {
 public:
  virtual ~Sink() = default;
  // Before the first step of a new run.
  virtual void validated_at_start(const Validation& /*validation*/) {}
  virtual void step(const StepRecord& record) = 0;
  // Before a checkpoint that a run may go on from: lines of steps up to it are
  // on the disk, where they can be.
  virtual void sync() {}
  virtual void close(const RunEnd& end) = 0;
};

// Several sinks as one.
class Sinks : public Sink {
 public:
  void add(std::unique_ptr<Sink> sink) { sinks_.push_back(std::move(sink)); }
  void validated_at_start(const Validation& validation) override;
  void step(const StepRecord& record) override;
  void sync() override;
  void close(const RunEnd& end) override;

 private:
  std::vector<std::unique_ptr<Sink>> sinks_;
};

// What a run folder holds: metrics.jsonl, samples.jsonl and events.* where they
// are asked for, and summary.json; and the progress lines on the screen. Makes
// the folder. Lines of steps after info.first_step are dropped.
std::unique_ptr<Sink> make_sinks(const MonitorConfig& config,
                                 const RunInfo& info);

}  // namespace tessera::monitor
