// Runs a program: it calls the right function of an actor, whatever the
// schedule says, and nothing more.
//
// Comm:   none of its own; an actor's functions communicate.
// Errors: what an actor throws passes through; a c10::Error names the
//         instruction, and so does rank_context().doing for all others.
#pragma once

#include <cstddef>
#include <functional>

#include "tessera/program/instruction.h"

namespace tessera::program {

// Who does what a program says, on one rank: a function for each kind of
// instruction, which refuses what an actor does not know. `unit` is -1 where
// the program names whole chunks.
class Actor {
 public:
  virtual ~Actor() = default;
  // Before each instruction: which version it reads or writes.
  virtual void use_version(int64_t version);
  virtual void zero_gradients();
  virtual void load_inputs(int64_t microbatch);
  virtual void load_targets(int64_t microbatch);
  virtual void load_documents(int64_t microbatch);
  virtual void forward(int64_t microbatch, int64_t unit);
  virtual void recompute(int64_t microbatch, int64_t unit);
  virtual void replay(int64_t microbatch, int64_t unit);
  virtual void loss(int64_t microbatch);
  // kBackward, kBackwardInput or kBackwardWeight.
  virtual void backward(Op part, int64_t microbatch, int64_t unit);
  // From a chunk of this rank to the next one, and to the one before.
  virtual void hand_activations(int64_t microbatch, int64_t chunk);
  virtual void hand_gradients(int64_t microbatch, int64_t chunk);
  // What is_communication() or is_fetch(). `awaited_next`: nothing lies
  // between.
  virtual void begin(const Instruction& instruction, bool awaited_next) = 0;
  virtual void await(const Instruction& instruction) = 0;
  virtual void free_parameters(int64_t unit);
  virtual void allocate_gradients(int64_t unit);
  virtual void norm();
  virtual void clip_gradients();
  virtual void keep_parameters(int64_t unit);
  virtual void optimizer_step(int64_t unit);
  virtual void next_version();
  virtual void release(const Instruction& instruction);
  // Of data parallelism on threads.
  virtual void replicate_parameters();
  virtual void reduce_replicas();
};

// Hears of each instruction when it is done: when it began and ended, in
// seconds of a clock that the processes of a host share. For monitors.
using Observer =
    std::function<void(const Instruction&, double begin_s, double end_s)>;

void execute(const Program& program, Actor& actor,
             const Observer& observer = nullptr);
// Instructions [first, last) of it.
void execute(const Program& program, size_t first, size_t last, Actor& actor,
             const Observer& observer = nullptr);

}  // namespace tessera::program
