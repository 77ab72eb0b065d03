#include "tessera/program/schedules/pipeline.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera::program::schedules {
namespace {

// A forward or a backward of some micro-batch and chunk.
struct Work {
  bool is_forward;
  int64_t microbatch;
  int64_t chunk;
};

// Writes a rank's program, with the messages that its place asks for.
class Writer {
 public:
  Writer(const Pipeline& pipeline, int64_t stage)
      : pipeline_(pipeline), stage_(stage) {
    program_.push_back({Op::kZeroGradients});
  }

  void receive_for(const Work& work) {
    if (work.is_forward && !is_first(work.chunk)) {
      push(Op::kReceiveActivations, work);
    } else if (!work.is_forward && !is_last(work.chunk)) {
      push(Op::kReceiveGradients, work);
    }
  }

  void compute(const Work& work) {
    if (work.is_forward) {
      if (is_first(work.chunk)) push(Op::kLoadInputs, work);
      push(Op::kForward, work);
    } else {
      if (is_last(work.chunk)) push(Op::kLoadTargets, work);
      push(Op::kBackward, work);
    }
  }

  void send_from(const Work& work) {
    if (work.is_forward && !is_last(work.chunk)) {
      push(Op::kSendActivations, work);
    } else if (!work.is_forward && !is_first(work.chunk)) {
      push(Op::kSendGradients, work);
    }
  }

  Program finish() {
    program_.push_back({Op::kAwaitGradients});
    if (pipeline_.clip) program_.push_back({Op::kClipNorm});
    program_.push_back({Op::kOptimizerStep});
    return std::move(program_);
  }

 private:
  bool is_first(int64_t chunk) const { return stage_ == 0 && chunk == 0; }
  bool is_last(int64_t chunk) const {
    return stage_ == pipeline_.stages - 1 && chunk == pipeline_.chunks - 1;
  }
  void push(Op op, const Work& work) {
    program_.push_back({op, work.microbatch, -1, work.chunk});
  }

  const Pipeline& pipeline_;
  int64_t stage_;
  Program program_;
};

// Works that run one after the other; what the next turn needs is received
// together with what this one sends. Else two ranks in the steady state would
// each wait for the other's receive.
using Turn = std::vector<Work>;

// The order of this rank's forwards and backwards, in turn behind `ahead`
// forwards. `forwards` and `backwards` list them in their own order. `paired`:
// a forward and the backward behind it are one turn, as chunks need it, whose
// messages cross.
std::vector<Turn> in_turn(const std::vector<Work>& forwards,
                          const std::vector<Work>& backwards, int64_t ahead,
                          bool paired = false) {
  const auto n = static_cast<int64_t>(forwards.size());
  ahead = std::min(ahead, n);
  std::vector<Turn> turns;
  for (int64_t i = 0; i < ahead; ++i) turns.push_back({forwards[i]});
  for (int64_t i = 0; i < n; ++i) {
    const bool has_forward = ahead + i < n;
    if (has_forward) turns.push_back({forwards[ahead + i]});
    if (!has_forward || !paired) turns.emplace_back();
    turns.back().push_back(backwards[i]);
  }
  return turns;
}

std::vector<Turn> turns_of(const Pipeline& pipeline, int64_t stage) {
  const int64_t m = pipeline.num_microbatches, p = pipeline.stages,
                v = pipeline.chunks;
  std::vector<Work> forwards, backwards;
  // Groups of p micro-batches go through one chunk after the other.
  for (int64_t k = 0; k < m * v; ++k) {
    const int64_t in_group = k % (p * v), chunk = in_group / p;
    const int64_t microbatch = v == 1 ? k : k / (p * v) * p + in_group % p;
    forwards.push_back({true, microbatch, v == 1 ? 0 : chunk});
    backwards.push_back({false, microbatch, v == 1 ? 0 : v - 1 - chunk});
  }
  if (pipeline.schedule == "naive") return in_turn(forwards, backwards, 0);
  if (pipeline.schedule == "gpipe") {
    std::reverse(backwards.begin(), backwards.end());
    return in_turn(forwards, backwards, m);
  }
  if (v == 1) return in_turn(forwards, backwards, p - 1 - stage);
  return in_turn(forwards, backwards, 2 * (p - 1 - stage) + (v - 1) * p,
                 /*paired=*/true);
}

}  // namespace

Program pipeline(const Pipeline& pipeline, int64_t stage) {
  TORCH_INTERNAL_ASSERT(pipeline.num_microbatches >= 1 &&
                        (pipeline.chunks == 1 ||
                         pipeline.num_microbatches % pipeline.stages == 0));
  Writer writer(pipeline, stage);
  const auto turns = turns_of(pipeline, stage);
  for (size_t i = 0; i <= turns.size(); ++i) {
    if (i > 0) {
      for (const Work& work : turns[i - 1]) writer.compute(work);
      for (const Work& work : turns[i - 1]) writer.send_from(work);
    }
    if (i == turns.size()) break;
    for (const Work& work : turns[i]) writer.receive_for(work);
  }
  return writer.finish();
}

}  // namespace tessera::program::schedules
