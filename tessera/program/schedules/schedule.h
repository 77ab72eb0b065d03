// A schedule: in which order the ranks that hold a model's stages take their
// micro-batches forward and backward.
//
// A stage is a run of units; p stages hold a model, and m micro-batches go
// through them. With v chunks a rank holds v runs: chunk c of rank s is virtual
// stage c p + s. With one stage a schedule is gradient accumulation.
// Here:    the list of schedules (list.cpp), and what makes of a schedule's
//          turns a rank's program, with the messages that its place asks for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/program/instruction.h"

namespace tessera::program::schedules {

struct Shape {
  int64_t stages = 1;            // p
  int64_t chunks = 1;            // v
  int64_t num_microbatches = 1;  // m
  // Whether attention needs to know where documents begin, on every stage.
  bool documents = false;
};

// A chunk's forward or backward, whole or in its parts, of a micro-batch.
struct Task {
  Op op = Op::kForward;  // kForward, kBackward, kBackwardInput, kBackwardWeight
  int64_t microbatch = 0;
  int64_t chunk = 0;
};

// Tasks that run one after the other; what the next turn needs is received
// together with what this one sends. Else two ranks in the steady state would
// each wait for the other's receive.
using Turn = std::vector<Task>;

struct Schedule {
  const char* name;  // of pipeline.schedule
  // A pure function: the turns of the rank that holds stage `stage`.
  std::vector<Turn> (*turns)(const Shape& shape, int64_t stage);
  bool chunked = false;             // a rank may hold several chunks
  bool multiple_of_stages = false;  // m is a multiple of p
  // What a rank sends may have to wait for a receiver that is not that far: it
  // is awaited at the end of the step. Its tensors live until then.
  bool sends_wait = false;
  const char* meaning = "";
  const char* source = "";
};

// In the order of the manual.
const std::vector<Schedule>& all();
// REQUIRES: one of all().
const Schedule& named(std::string_view name);
std::vector<std::string> names();

// What a step ends with.
struct Tail {
  bool clip = true;
  bool alone = false;  // the norm is one rank's: there is nothing to sum
};

// A step of the rank that holds stage `stage`, in whole chunks.
// REQUIRES: what the schedule says of m and v.
Program step(const Schedule& schedule, const Shape& shape, int64_t stage,
             const Tail& tail = {});

// The micro-batches forward alone, and their losses.
Program evaluation(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
