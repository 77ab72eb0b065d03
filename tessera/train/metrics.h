// What a run says of itself, step by step.
//
// Comm:   exchange() is one all_gather of a few doubles a rank, on the world:
//         the sums are taken in rank order, alike on every rank and backend.
//         With experts also an all_reduce of their counts. Every twenty steps
//         it measures some of the links between ranks (comm/link.h), every
//         hundred the time of five all_reduces.
// Writes: on rank 0, the sinks of monitor/: metrics.jsonl, TensorBoard, the
//         progress line, summary.json.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "tessera/comm/communicator.h"
#include "tessera/engine/run_config.h"
#include "tessera/engine/traffic.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/monitor/step_record.h"
#include "tessera/monitor/timeline.h"
#include "tessera/train/run_folder.h"

namespace tessera::train {

// Of all ranks together.
struct StepTotals {
  // But for what the trainer knows: step, lr, step_s and validation.
  monitor::StepRecord record = {};
  bool stop = false;       // some rank was asked to stop
  bool is_saving = false;  // some rank is writing a checkpoint
};

// Of a rank, in some time.
struct Usage {
  engine::Traffic traffic;
  double mem_peak_mib = 0;
};

// This rank's part of a step.
struct StepShare {
  double loss_sum = 0;
  double weight = 0;
  double aux_sum = 0;
  double ahead_loss = 0;
  at::Tensor expert_counts = {};  // nn::Balance's, or undefined
  double grad_norm = 0;
  Usage usage;
  // Where it was taken: of all ranks, or of none.
  std::optional<monitor::Timeline> timeline = {};
  bool stop = false;
  bool is_saving = false;
};

class Metrics {
 public:
  // `first_step`: updates done before; lines of later steps, left by a run that
  // was killed, are dropped.
  Metrics(const engine::RunConfig& config, const RunFolder& folder,
          comm::Communicator& ranks, const mesh::DeviceMesh& mesh,
          int64_t first_step, double steps_per_epoch, int64_t tokens_before,
          std::optional<double> best_valid_loss);
  ~Metrics();

  // What ranks sent until here (a validation, a checkpoint) is not the step's.
  void begin_step();
  // What groups have moved since then, or since it was asked for last, and the
  // most that tensors had of memory since that.
  Usage take_usage();
  StepTotals exchange(const StepShare& share);
  void validated_at_start(const monitor::Validation& validation);
  // The trainer's part is in it by now; rates follow here.
  void record(monitor::StepRecord record);
  // monitor::Sink::sync().
  void sync();
  void close(const monitor::RunEnd& end);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::train
