// What fully_shard() holds of a module on one rank, said from its layouts and
// the order in which it is gathered and reduced: no step is run for it.
//
// Counted: parameters, gradients, buffers of the collectives that move them,
//          optimizer states. Not counted: the module's activations and buffers,
//          what an optimizer's step takes meanwhile, gather()'s masters where
//          gathers round.
// Assumed: zero_grad() between a step's update and the next forward, and units
//          used in the order that is known: that of declaration, or once all
//          ranks had the same first forward that one.
// Units:   bytes.
#pragma once

#include <cstdint>

namespace tessera {

struct ShardedMemory {
  struct Part {
    int64_t held = 0;    // between steps
    int64_t beside = 0;  // at most beyond these, in a step or an evaluation
    int64_t peak() const { return held + beside; }
  };
  // Shards, of stages 0 to 2 whole parameters too, in compute_dtype beside
  // shards where there is one. Beside them: what is gathered.
  Part parameters;
  // Of stages 0 and 1 whole, else shards. Beside them: whole ones, what they
  // are packed and reduced into, and shards' .grad where that is of another
  // type than reduce_dtype.
  Part gradients;
  int64_t optimizer = 0;
  // At most beside what is held, of both at once: often less than the sum.
  int64_t beside = 0;

  int64_t held() const { return parameters.held + gradients.held + optimizer; }
  int64_t peak() const { return held() + beside; }
};

}  // namespace tessera
