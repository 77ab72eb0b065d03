#include "tessera/engine/step_graph.h"

#include <utility>

#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/core/log.h"
#include "tessera/core/memory_kind.h"
#include "tessera/monitor/memory.h"
#include "tessera/nn/kernel_choice.h"

namespace tessera::engine {

bool StepGraph::is_for(const RunConfig& config, int64_t ranks,
                       c10::Device device) {
  const models::ModelConfig& model = config.model;
  return DeviceGraph::can_record(device) && nn::uses(nn::Kernel::kStepGraph) &&
         ranks == 1 && !config.mesh.star() && !config.pipeline.delayed() &&
         !model.moe.noise && model.mtp.layers == 0 && model.dropout == 0 &&
         !config.data.documents_apart() && !config.zero.offloads() &&
         config.monitor.trace == 0;
}

StepGraph::StepGraph(c10::Device device) { take_stream(device); }

StepGraph::~StepGraph() { let_go(); }

void StepGraph::let_go() {
  recorded_.reset();
  graph_.reset();
  give_back_memory_receipt(std::exchange(memory_, nullptr));
}

void StepGraph::take(ModelActor& actor, const std::function<void()>& run,
                     const std::function<void()>& begin) {
  if (!actor.can_repeat()) return run_beside(run, begin);
  if (tries_left_ == 0) return run();
  // The first one finds the memory that stays, and compiles.
  const bool is_alike = last_ == actor.numbers();
  last_ = actor.numbers();
  if (!is_alike) {
    if (recorded_) {
      let_go();
      --tries_left_;
    }
    return run_as_ever(run);
  }
  actor.load_in_place();
  if (recorded_) {
    actor.begin_repeated(*recorded_);
  } else if (!record(actor, run)) {
    begin();
    return run();
  }
  graph_->repeat();
}

// A step by itself, for which there may be no memory beside the recorded one's.
void StepGraph::run_beside(const std::function<void()>& run,
                           const std::function<void()>& begin) {
  if (!recorded_) return run();
  try {
    return run();
  } catch (const c10::OutOfMemoryError&) {
    let_go();
  }
  begin();
  run();
}

void StepGraph::run_as_ever(const std::function<void()>& run) {
  const int64_t before = host_reads();
  run();
  if (host_reads() > before) tries_left_ = 0;
}

bool StepGraph::record(ModelActor& actor, const std::function<void()>& run) {
  actor.begin_recording();
  const int64_t before = monitor::tensor_bytes().now;
  monitor::reset_tensor_peak();
  auto graph = std::make_unique<DeviceGraph>();
  try {
    graph->record(run);
  } catch (const std::exception& error) {
    tries_left_ = 0;
    actor.give_up_recording();
    log::warning(
        "steps are not recorded as a graph of the GPU, and run one by "
        "one as before: ",
        message_of(error));
    return false;
  }
  graph_ = std::move(graph);
  recorded_ = std::make_unique<ModelActor::Repeated>(actor.end_recording());
  const MemoryScope scope(MemoryKind::kWork);
  memory_ = take_memory_receipt(monitor::tensor_bytes().peak - before);
  return true;
}

}  // namespace tessera::engine
