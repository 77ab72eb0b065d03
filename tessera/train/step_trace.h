// The trace of a run's first steps: what monitor.trace of them did on this
// rank, and on rank 0 all ranks' put together.
//
// Comm:   add() when the last step has come, and finish(), once there is
//         anything: a barrier. open(): a broadcast of a number.
// Errors: a trace that cannot be written is a warning: no reason to end a run.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/engine/run_config.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/monitor/span.h"
#include "tessera/monitor/trace.h"
#include "tessera/train/run_folder.h"

namespace tessera::train {

class StepTrace {
 public:
  // These outlive it.
  StepTrace(const engine::RunConfig& config, const RunFolder& folder,
            comm::Communicator& ranks)
      : config_(config), folder_(folder), ranks_(ranks) {}

  // Of the step of this number in this process: the first one opens things and
  // is left out.
  void add(int64_t number, const mesh::DeviceMesh& mesh,
           const std::vector<monitor::Span>& spans);
  // Writes what there is, where the run ends before the last of them.
  void finish();

 private:
  void open(const mesh::DeviceMesh& mesh);

  const engine::RunConfig& config_;
  const RunFolder& folder_;
  comm::Communicator& ranks_;
  std::unique_ptr<monitor::TraceWriter> writer_;  // once it has begun
};

}  // namespace tessera::train
