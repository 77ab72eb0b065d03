// What tests/parity/test_tensorboard.py reads: a run that was resumed.
//
//   tensorboard_driver FOLDER    steps 1 to 5, then again from step 4 to 6;
//                                the same records in metrics.jsonl
#include <cmath>

#include "tessera/monitor/json_lines.h"
#include "tessera/monitor/tensorboard.h"

namespace {

using namespace tessera::monitor;

StepRecord record_of(int64_t step, int64_t start) {
  StepRecord record;
  record.step = step;
  record.loss =
      std::exp(-static_cast<double>(step)) + static_cast<double>(start);
  record.grad_norm = 1.0 / static_cast<double>(step);
  record.lr = 3e-4;
  record.tokens = 4096;
  record.step_s = 0.125;
  record.tokens_per_s = 32768;
  record.mfu = 0.25;
  record.mem_peak_mib = 512;
  if (step % 2 == 0) record.validation = Validation{.loss = 0.5};
  return record;
}

void run(const std::string& folder, int64_t first_step, int64_t last_step) {
  RunInfo info;
  info.folder = folder;
  info.first_step = first_step;
  info.total_steps = 6;
  info.world_size = 2;
  info.host_memory_mib = 2048;
  const std::string metrics = folder + "/metrics.jsonl";
  truncate_after(metrics, first_step);
  JsonLines lines(metrics);
  TensorBoard events(info);
  for (int64_t step = first_step + 1; step <= last_step; ++step) {
    lines.step(record_of(step, first_step));
    events.step(record_of(step, first_step));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  run(argv[1], 0, 5);
  run(argv[1], 3, 6);
  return 0;
}
