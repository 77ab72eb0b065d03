// Where a message between stages goes, and under which tag: for what sends it
// and for what records it.
#pragma once

#include <cstdint>

#include "tessera/parallel/compose.h"
#include "tessera/program/instruction.h"

namespace tessera::engine {

// The stage at the other end, and a tag that names kind, micro-batch and
// receiver.
struct Wire {
  bool sends;
  bool activations;
  int64_t peer;
  int64_t tag;
};

// REQUIRES: is_message(message.op).
Wire wire_of(const parallel::Composed& composed,
             const program::Instruction& message);

}  // namespace tessera::engine
