// summary.json: how the run went, written when it ends.
//
// steps is the last step taken; steps_run, tokens, seconds and tokens_per_s are
// of this start alone. A run that goes on, or whose rank 0 was killed, has
// none of rank 0's: see train/run_end.h.
#pragma once

#include <chrono>
#include <optional>

#include "tessera/monitor/sink.h"

namespace tessera::monitor {

class Summary : public Sink {
 public:
  explicit Summary(const RunInfo& info);
  void validated_at_start(const Validation& validation) override;
  void step(const StepRecord& record) override;
  void close(const RunEnd& end) override;

 private:
  RunInfo info_;
  std::chrono::steady_clock::time_point started_;
  std::optional<StepRecord> last_;
  std::optional<double> first_loss_;
  std::optional<double> valid_loss_at_start_;
  std::optional<double> last_valid_loss_;
  std::optional<double> best_valid_loss_;
  int64_t steps_run_ = 0;
  int64_t skipped_steps_ = 0;
  int64_t tokens_ = 0;
  double step_seconds_ = 0;
  double mem_peak_mib_ = 0;
};

}  // namespace tessera::monitor
