// Steps of one GPU as one launch: one is recorded, and from there on the device
// repeats it.
//
// For:     a rank by itself whose host decides nothing inside of a step
//          (ModelActor::can_repeat) and hands it no number but what
//          Optimizer::send_pace() and load_in_place() put where the device
//          reads it: no dropout, noise of gates, documents, predictions further
//          ahead, states in files; nor where a trace is to have each
//          instruction. Else nothing happens here: steps are run as ever.
// When:    the second of two steps of the same numbers (ModelActor::Numbers) is
//          recorded. One of others lets go of it, for two alike to come; behind
//          the third time no step is recorded any more, nor where the host has
//          read something in the middle of one, as the sizes of experts'
//          products that no single kernel takes. One that is not to be repeated
//          lets go of it where it finds no memory beside.
// Bits:    those of a step that is run.
// Memory:  what a step needs at most is the graph's as long as there is one,
//          and is booked so beside its tensors.
// Heard:   an observer hears of the instructions of a recorded step as they are
//          recorded, of a repeated one nothing.
// Choice:  TESSERA_WITHOUT_KERNELS=step_graph.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "tessera/core/device_graph.h"
#include "tessera/engine/model_actor.h"
#include "tessera/engine/run_config.h"

namespace tessera::engine {

class StepGraph {
 public:
  // Whether steps of such a run may be repeated, on such a device.
  static bool is_for(const RunConfig& config, int64_t ranks,
                     c10::Device device);

  // REQUIRES: is_for(). This thread's stream from here on is its own.
  explicit StepGraph(c10::Device device);
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  // The step that the actor has begun, of which `run` is all of it, and `begin`
  // begins it again where it could not be recorded.
  void take(ModelActor& actor, const std::function<void()>& run,
            const std::function<void()>& begin);

  // Whether steps are repeated from here on.
  bool has_recorded() const { return recorded_ != nullptr; }

 private:
  void run_beside(const std::function<void()>& run,
                  const std::function<void()>& begin);
  void run_as_ever(const std::function<void()>& run);
  bool record(ModelActor& actor, const std::function<void()>& run);
  void let_go();

  int64_t tries_left_ = 3;
  // Of the step before, and of that which was recorded.
  std::optional<ModelActor::Numbers> last_;
  std::unique_ptr<DeviceGraph> graph_;
  std::unique_ptr<ModelActor::Repeated> recorded_;
  void* memory_ = nullptr;  // its receipt
};

}  // namespace tessera::engine
