#include "tessera/program/schedules/schedule.h"

#include <c10/util/Exception.h>

#include <utility>

namespace tessera::program::schedules {
namespace {

class Writer {
 public:
  Writer(const Shape& shape, int64_t stage, bool sends_wait)
      : shape_(shape), stage_(stage), sends_wait_(sends_wait) {}

  void push(Instruction instruction) { program_.push_back(instruction); }

  void turns(const std::vector<Turn>& turns, bool trains) {
    for (size_t i = 0; i <= turns.size(); ++i) {
      if (i > 0) {
        for (const Task& task : turns[i - 1]) compute(task, trains);
        for (const Task& task : turns[i - 1]) send_from(task);
      }
      if (i == turns.size()) break;
      for (const Task& task : turns[i]) receive_for(task);
    }
    for (const auto& sent : sent_) push(await(sent));
  }

  Program finish() { return std::move(program_); }

 private:
  // The gradient of a chunk's input is there behind its first part.
  static bool takes_gradients(const Task& task) {
    return task.op == Op::kBackward || task.op == Op::kBackwardInput;
  }

  void receive_for(const Task& task) {
    if (task.op == Op::kForward && !is_first(task.chunk)) {
      push(Op::kReceiveActivations, task);
    } else if (takes_gradients(task) && !is_last(task.chunk)) {
      push(Op::kReceiveGradients, task);
    }
  }

  void compute(const Task& task, bool trains) {
    const bool forward = task.op == Op::kForward;
    if (forward && is_first(task.chunk)) {
      push(Op::kLoadInputs, task);
    } else if (forward && shape_.documents) {
      push(Op::kLoadDocuments, task);
    }
    // A loss that is trained on comes right before its backward.
    if (takes_gradients(task) && is_last(task.chunk)) loss_of(task);
    push(task.op, task);
    if (forward && !trains && is_last(task.chunk)) loss_of(task);
  }

  void loss_of(const Task& task) {
    push(Op::kLoadTargets, task);
    push(Op::kLoss, task);
  }

  void send_from(const Task& task) {
    if (task.op == Op::kForward && !is_last(task.chunk)) {
      send(Op::kSendActivations, task);
    } else if (takes_gradients(task) && !is_first(task.chunk)) {
      send(Op::kSendGradients, task);
    }
  }

  void send(Op op, const Task& task) {
    if (!sends_wait_) return push(op, task);
    sent_.push_back({op, task.microbatch, -1, task.chunk});
    push(begin(sent_.back()));
  }

  bool is_first(int64_t chunk) const { return stage_ == 0 && chunk == 0; }
  bool is_last(int64_t chunk) const {
    return stage_ == shape_.stages - 1 && chunk == shape_.chunks - 1;
  }
  void push(Op op, const Task& task) {
    program_.push_back({op, task.microbatch, -1, task.chunk});
  }

  const Shape& shape_;
  int64_t stage_;
  bool sends_wait_;
  Program program_;
  Program sent_;  // and not awaited yet
};

}  // namespace

const Schedule& named(std::string_view name) {
  for (const Schedule& schedule : all()) {
    if (schedule.name == name) return schedule;
  }
  TORCH_INTERNAL_ASSERT(false, "program: there is no schedule ", name);
}

std::vector<std::string> names() {
  std::vector<std::string> names;
  for (const Schedule& schedule : all()) names.emplace_back(schedule.name);
  return names;
}

Program step(const Schedule& schedule, const Shape& shape, int64_t stage,
             const Tail& tail) {
  TORCH_INTERNAL_ASSERT(
      shape.num_microbatches >= 1 &&
      (shape.chunks == 1 ||
       (schedule.chunked && (!schedule.multiple_of_stages ||
                             shape.num_microbatches % shape.stages == 0))));
  Writer writer(shape, stage, schedule.sends_wait);
  writer.push({Op::kZeroGradients});
  writer.turns(schedule.turns(shape, stage), /*trains=*/true);
  writer.push({Op::kNorm});
  if (!tail.alone) writer.push({Op::kSumNorm});
  if (tail.clip) writer.push({Op::kClipGradients});
  writer.push({Op::kOptimizerStep});
  return writer.finish();
}

Program evaluation(const Shape& shape, int64_t stage) {
  std::vector<Turn> turns;
  for (int64_t m = 0; m < shape.num_microbatches; ++m) {
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      turns.push_back({{Op::kForward, m, chunk}});
    }
  }
  Writer writer(shape, stage, /*sends_wait=*/false);
  writer.turns(turns, /*trains=*/false);
  return writer.finish();
}

}  // namespace tessera::program::schedules
