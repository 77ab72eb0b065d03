// The bytes that a rank holds at every instruction of its program, from facts.
//
// Counted is what instructions make and let go of: activations and their
// gradients, gathered parameters, whole gradients of shards, buffers of
// collectives, states that lie in files while they are fetched. Model states
// that live between steps are facts of their own (held_by()). A program without
// a backward is an evaluation, whose forwards keep nothing. Not counted:
// oneDNN's scratch inside of a product in bf16.
// No tensor, no group, no process.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/program/facts.h"
#include "tessera/program/instruction.h"
#include "tessera/program/units.h"

namespace tessera::program {

struct Memory {
  std::vector<int64_t> behind;  // alive behind each instruction
  std::vector<int64_t> during;  // the most while it runs
  int64_t peak() const;
};

// REQUIRES: a program that went through all passes with these units.
Memory memory_of(const Program& program, const Units& units,
                 const Facts& facts);

}  // namespace tessera::program
