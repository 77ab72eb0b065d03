// Runs a program: it calls the right function of a stage, whatever the schedule
// says, and nothing more.
//
// Comm:   none of its own; a stage's functions communicate.
// Errors: what a stage throws passes through, with the instruction named.
#pragma once

#include <functional>

#include "tessera/program/instruction.h"

namespace tessera::program {

// One stage of a model on one rank: what each instruction does there.
class Stage {
 public:
  virtual ~Stage() = default;
  virtual void zero_gradients() = 0;
  virtual void load_inputs(int64_t microbatch) = 0;
  virtual void load_targets(int64_t microbatch) = 0;
  // Messages that follow one another: all are posted, then awaited.
  virtual void exchange(const Program& messages) = 0;
  // `unit` is -1 where the program names whole chunks.
  virtual void forward(int64_t microbatch, int64_t unit) = 0;
  virtual void backward(int64_t microbatch, int64_t unit) = 0;
  virtual void gather_parameters(int64_t unit) = 0;
  virtual void free_parameters(int64_t unit) = 0;
  virtual void reduce_gradients(int64_t unit) = 0;
  virtual void await_gradients() = 0;
  virtual void clip_norm() = 0;
  virtual void optimizer_step() = 0;
};

// Hears of each instruction and how many seconds it took; of messages that are
// exchanged together, of the first. For monitors.
using Observer = std::function<void(const Instruction&, double seconds)>;

void execute(const Program& program, Stage& stage,
             const Observer& observer = nullptr);

}  // namespace tessera::program
