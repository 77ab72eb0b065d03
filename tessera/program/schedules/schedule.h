// A schedule: in which order the ranks that hold a model's stages take their
// micro-batches forward and backward.
//
// A stage is a run of units; p stages hold a model, and m micro-batches go
// through them. With v chunks a rank holds v runs, which ones its placement
// says (program/placement.h). With one stage a schedule is gradient
// accumulation.
// Here:    the list of schedules (list.cpp), and what makes of a schedule's
//          turns a rank's program, with the messages that its place asks for;
//          schedules of files are read by file.h.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/program/instruction.h"
#include "tessera/program/placement.h"
#include "tessera/program/units.h"

namespace tessera::program::schedules {

struct Shape {
  int64_t stages = 1;            // p
  int64_t chunks = 1;            // v
  int64_t num_microbatches = 1;  // m
  // Whether attention needs to know where documents begin, on every stage.
  bool documents = false;
  // Whether the last chunk's forward needs the tokens ahead of its input's.
  bool ahead = false;
  bool reversed = true;  // gpipe's backwards: the last micro-batch first
};

// A chunk's forward or backward, whole or in its parts, of a micro-batch.
struct Task {
  Op op = Op::kForward;  // kForward, kBackward, kBackwardInput, kBackwardWeight
  int64_t microbatch = 0;
  int64_t chunk = 0;
  bool operator==(const Task&) const = default;
};

// The gradient of a chunk's input is there behind its first part.
inline bool takes_gradients(const Task& task) {
  return task.op == Op::kBackward || task.op == Op::kBackwardInput;
}

// Tasks that run one after the other; what the next turn needs is received
// together with what this one sends. Else two ranks in the steady state would
// each wait for the other's receive.
using Turn = std::vector<Task>;

struct Schedule {
  std::string name;  // of pipeline.schedule
  // A pure function: the turns of the rank that holds stage `stage`.
  std::function<std::vector<Turn>(const Shape& shape, int64_t stage)> turns;
  Placement placement = Placement::kRoundRobin;
  bool chunked = false;             // a rank may hold several chunks
  int64_t exact_chunks = 0;         // and holds so many; 0: any number
  bool multiple_of_stages = false;  // m is a multiple of p
  bool in_pairs = false;            // p and m are even
  std::optional<Shape> only = {};   // of a file: it has turns for this one
  // What a rank sends may have to wait for a receiver that is not that far: it
  // goes on, and receives in the order of who sends (mail.h). Each task of a
  // turn then has its own messages; those of a turn could run side by side.
  bool sends_wait = false;
  // A step's gradient is taken at the weights before the update before it, so
  // that nothing flushes the pipeline between steps: W(t + 1) = W(t) - f'(W(t -
  // 1)). Two versions of the weights; m is p or more.
  bool delayed = false;
  const char* meaning = "";
  const char* source = "";
};

// In the order of the manual.
const std::vector<Schedule>& all();
// REQUIRES: one of all(), or a file (file.h), which is read.
Schedule named(const std::string& name);
std::vector<std::string> names();

// The chunks of a rank where nobody says how many.
int64_t usual_chunks(const Schedule& schedule);
// Where its virtual stages lie.
Pipeline pipeline_of(const Schedule& schedule, const Shape& shape);
// Whether it has turns for so many stages, chunks and micro-batches.
bool takes(const Schedule& schedule, const Shape& shape);

// What stage `stage` of so many holds at a time.
Versions versions_of(const Schedule& schedule, int64_t stages, int64_t stage);

// What a step ends with.
struct Tail {
  bool clip = true;
  bool alone = false;  // the norm is one rank's: there is nothing to sum
};

// A step of the rank that holds stage `stage`, in whole chunks.
// REQUIRES: takes(schedule, shape).
Program step(const Schedule& schedule, const Shape& shape, int64_t stage,
             const Tail& tail = {});

// Steps of a schedule that goes on from one to the next are lowered, proven and
// simulated so many together: the first fills the pipeline, the last empties
// it, and what lies between is alike.
inline constexpr int64_t kStepsTogether = 4;

// So many steps one behind the other, without a flush between them: their
// micro-batches are counted on, and the k-th reads version k. A rank ends a
// step (kNextVersion) when all have done their backwards, of which the norm is
// the proof: stage s goes s micro-batches of the next batch backward meanwhile,
// and every stage p - 1 of them forward. See steps_of().
// REQUIRES: takes(schedule, shape); count is 1 unless schedule.delayed.
Program steps(const Schedule& schedule, const Shape& shape, int64_t stage,
              int64_t count, const Tail& tail = {});

// The micro-batches forward alone, and their losses; through one replica where
// there are two.
Program evaluation(const Shape& shape, int64_t stage,
                   Placement placement = Placement::kRoundRobin);

}  // namespace tessera::program::schedules
