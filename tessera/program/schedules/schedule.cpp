#include "tessera/program/schedules/schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "tessera/program/schedules/file.h"
#include "tessera/program/schedules/mail.h"

namespace tessera::program::schedules {
namespace {

class Writer {
 public:
  // `trains`: else forwards and losses alone.
  Writer(const Shape& shape, const Pipeline& pipeline, int64_t stage,
         bool trains)
      : shape_(shape), pipeline_(pipeline), stage_(stage), trains_(trains) {}

  void push(Instruction instruction) { program_.push_back(instruction); }
  void push_all(const Program& more) {
    program_.insert(program_.end(), more.begin(), more.end());
  }

  // What a turn sends goes with what the next one receives.
  void turns(const std::vector<Turn>& turns) {
    for (size_t i = 0; i <= turns.size(); ++i) {
      if (i > 0) {
        for (const Task& task : turns[i - 1]) compute(task);
        for (const Task& task : turns[i - 1]) send_from(task);
      }
      if (i == turns.size()) break;
      for (const Task& task : turns[i]) receive_for(task);
    }
  }

  // The same of single tasks, where more is done behind some of them: what
  // these send goes before it, and nobody waits for a neighbour that is not
  // that far.
  void turns(const std::vector<Turn>& turns,
             const std::function<Program(const Task&)>& behind) {
    receive_for(turns.front().front());
    for (size_t i = 0; i < turns.size(); ++i) {
      const Task& task = turns[i].front();
      const bool is_last = i + 1 == turns.size();
      compute(task);
      const Program more = behind(task);
      const Instruction send = message_from(task);
      const bool sends_before = !more.empty() && !is_last && is_send(send.op);
      if (sends_before) {
        push(begin(send));
      } else {
        send_from(task);
      }
      push_all(more);
      if (!is_last) receive_for(turns[i + 1].front());
      if (sends_before) push(await(send));
    }
  }

  // What a task sends goes at once, and is awaited when it has come.
  void tasks(Mail mail) {
    for (size_t i = 0; i < mail.tasks().size(); ++i) {
      push_all(mail.receives(i));
      push_all(mail.arrived());
      const Task& task = mail.tasks()[i];
      compute(task);
      const Instruction send = message_from(task);
      if (!is_send(send.op)) continue;
      push(begin(send));
      mail.sent(send);
    }
    push_all(mail.rest());
  }

  Program finish() { return std::move(program_); }

 private:
  void receive_for(const Task& task) {
    const Place here{stage_, task.chunk};
    if (task.op == Op::kForward && comes_from_afar(pipeline_.before(here))) {
      push(Op::kReceiveActivations, task);
    } else if (takes_gradients(task) &&
               comes_from_afar(pipeline_.behind(here))) {
      push(Op::kReceiveGradients, task);
    }
  }

  bool comes_from_afar(const std::optional<Place>& place) const {
    return place && place->stage != stage_;
  }

  void compute(const Task& task) {
    const bool forward = task.op == Op::kForward;
    const Place here{stage_, task.chunk};
    const bool is_last = pipeline_.is_last(here);
    if (forward && pipeline_.is_first(here)) {
      push(Op::kLoadInputs, task);
    } else if (forward && (shape_.documents || (shape_.ahead && is_last))) {
      push(Op::kLoadDocuments, task);
    }
    // A loss that is trained on comes right before its backward.
    if (takes_gradients(task) && is_last) loss_of(task);
    push(task.op, task);
    if (forward && !trains_ && is_last) loss_of(task);
    if (is_hand_over(message_of(task))) push(message_of(task), task);
  }

  void loss_of(const Task& task) {
    push(Op::kLoadTargets, task);
    push(Op::kLoss, task);
  }

  // How what a task makes goes on; its own op where it stays.
  Op message_of(const Task& task) const {
    const Place here{stage_, task.chunk};
    if (task.op == Op::kForward) {
      const auto next = pipeline_.behind(here);
      if (!next) return task.op;
      return next->stage == stage_ ? Op::kHandActivations
                                   : Op::kSendActivations;
    }
    const auto next = pipeline_.before(here);
    if (!next || !takes_gradients(task)) return task.op;
    return next->stage == stage_ ? Op::kHandGradients : Op::kSendGradients;
  }

  Instruction message_from(const Task& task) const {
    return of(message_of(task), task);
  }

  void send_from(const Task& task) {
    if (is_send(message_of(task))) push(message_of(task), task);
  }

  // Micro-batches behind a step's are of the next ones.
  Instruction of(Op op, const Task& task) const {
    return {.op = op,
            .microbatch = task.microbatch,
            .chunk = task.chunk,
            .version = task.microbatch / shape_.num_microbatches};
  }
  void push(Op op, const Task& task) { push(of(op, task)); }

  const Shape& shape_;
  const Pipeline& pipeline_;
  int64_t stage_;
  bool trains_;
  Program program_;
};

}  // namespace

Schedule named(const std::string& name) {
  if (names_file(name)) return read_schedule(name);
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

int64_t usual_chunks(const Schedule& schedule) {
  if (schedule.only) return schedule.only->chunks;
  return std::max<int64_t>(1, schedule.exact_chunks);
}

Pipeline pipeline_of(const Schedule& schedule, const Shape& shape) {
  return {shape.stages, shape.chunks, schedule.placement};
}

bool takes(const Schedule& schedule, const Shape& shape) {
  const int64_t p = shape.stages, v = shape.chunks, m = shape.num_microbatches;
  if (schedule.only) {
    return p == schedule.only->stages && v == schedule.only->chunks &&
           m == schedule.only->num_microbatches;
  }
  const bool has_chunks = schedule.exact_chunks > 0
                              ? v == schedule.exact_chunks
                              : v == 1 || (schedule.chunked && p > 1);
  const bool in_groups = v == 1 || !schedule.multiple_of_stages || m % p == 0;
  const bool in_pairs = !schedule.in_pairs || (p % 2 == 0 && m % 2 == 0);
  const bool enough = !schedule.delayed || m >= p;
  return p >= 1 && v >= 1 && m >= 1 && has_chunks && in_groups && in_pairs &&
         enough;
}

Versions versions_of(const Schedule& schedule, int64_t stages, int64_t stage) {
  if (!schedule.delayed) return {};
  return {.parameters = 2, .gradients = stages > 1 && stage > 0 ? 2 : 1};
}

namespace {

void expect_taken(const Schedule& schedule, const Shape& shape) {
  TORCH_INTERNAL_ASSERT(takes(schedule, shape), "program: ", schedule.name,
                        " has no turns for ", shape.stages, " stages of ",
                        shape.chunks, " chunks and ", shape.num_microbatches,
                        " micro-batches");
}

// What ends a step.
Program tail_of(const Tail& tail, int64_t version, bool keeps) {
  Program program;
  const auto push = [&](Op op) {
    program.push_back({.op = op, .version = version});
  };
  if (tail.clip) push(Op::kClipGradients);
  if (keeps) push(Op::kKeepParameters);
  push(Op::kOptimizerStep);
  if (keeps) push(Op::kNextVersion);
  return program;
}

// Where the gradients of a step are complete, and where it ends, among the
// tasks of many.
class Boundaries {
 public:
  Boundaries(const Shape& shape, int64_t stage, int64_t count, const Tail& tail)
      : microbatches_(shape.num_microbatches),
        stage_(stage),
        count_(count),
        tail_(tail) {}

  // What a rank does behind this task.
  Program behind(const Task& task) {
    Program more;
    if (task.op != Op::kBackward) return more;
    ++backwards_;
    if (backwards_ % microbatches_ == 0) complete(more);
    if (backwards_ == end_of(ended_)) end(more);
    return more;
  }

 private:
  // After so many backwards: those of all stages are done by then.
  int64_t end_of(int64_t step) const {
    return std::min(count_ * microbatches_,
                    (step + 1) * microbatches_ + stage_);
  }

  void complete(Program& more) const {
    const int64_t version = backwards_ / microbatches_ - 1;
    more.push_back({.op = Op::kNorm, .version = version});
    if (!tail_.alone) more.push_back(begin(sum_norm(version)));
    if (stage_ > 0) zero(version + 1, more);
  }

  void end(Program& more) {
    if (!tail_.alone) more.push_back(await(sum_norm(ended_)));
    const Program tail = tail_of(tail_, ended_, /*keeps=*/true);
    more.insert(more.end(), tail.begin(), tail.end());
    ++ended_;
    if (stage_ == 0) zero(ended_, more);
  }

  // As early as there is room.
  void zero(int64_t version, Program& more) const {
    if (version == count_) return;
    more.push_back({.op = Op::kZeroGradients, .version = version});
  }

  static Instruction sum_norm(int64_t version) {
    return {.op = Op::kSumNorm, .version = version};
  }

  const int64_t microbatches_, stage_, count_;
  const Tail tail_;
  int64_t backwards_ = 0, ended_ = 0;
};

}  // namespace

Program steps(const Schedule& schedule, const Shape& shape, int64_t stage,
              int64_t count, const Tail& tail) {
  if (!schedule.delayed) {
    TORCH_INTERNAL_ASSERT(count == 1, "program: ", schedule.name,
                          " flushes behind each step");
    return step(schedule, shape, stage, tail);
  }
  expect_taken(schedule, shape);
  const Pipeline pipeline = pipeline_of(schedule, shape);
  Writer writer(shape, pipeline, stage, /*trains=*/true);
  writer.push({Op::kZeroGradients});
  Boundaries boundaries(shape, stage, count, tail);
  Shape all = shape;
  all.num_microbatches *= count;
  writer.turns(schedule.turns(all, stage),
               [&](const Task& task) { return boundaries.behind(task); });
  return writer.finish();
}

Program step(const Schedule& schedule, const Shape& shape, int64_t stage,
             const Tail& tail) {
  if (schedule.delayed) return steps(schedule, shape, stage, /*count=*/1, tail);
  expect_taken(schedule, shape);
  const Pipeline pipeline = pipeline_of(schedule, shape);
  Writer writer(shape, pipeline, stage, /*trains=*/true);
  writer.push({Op::kZeroGradients});
  if (schedule.sends_wait) {
    writer.tasks(Mail(schedule, shape, stage));
  } else {
    writer.turns(schedule.turns(shape, stage));
  }
  writer.push({Op::kNorm});
  if (!tail.alone) writer.push({Op::kSumNorm});
  writer.push_all(tail_of(tail, /*version=*/0, /*keeps=*/false));
  return writer.finish();
}

Program evaluation(const Shape& shape, int64_t stage,
                   Placement placement /* = kRoundRobin */) {
  const Pipeline pipeline{shape.stages, shape.chunks, placement};
  const int64_t chunks = pipeline.num_runs() / shape.stages;
  std::vector<Turn> turns;
  for (int64_t m = 0; m < shape.num_microbatches; ++m) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      turns.push_back({{Op::kForward, m, chunk}});
    }
  }
  Writer writer(shape, pipeline, stage, /*trains=*/false);
  writer.turns(turns);
  return writer.finish();
}

}  // namespace tessera::program::schedules
