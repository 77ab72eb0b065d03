// What an instruction does on groups.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/program/world.h"

namespace tessera::program::detail {

// In their order; nothing of an await, whose begin has them.
const std::vector<Transfer>& transfers_of(const RankProgram& of,
                                          const Instruction& instruction);
// Of one of these the larger of what goes in and comes out of a rank, as
// comm::VerbStats counts it. Of an all_gather that an instruction is `elements`
// are this rank's piece; inside of a unit they are the whole, as facts count
// them. `ranks`: of its group.
int64_t bytes_of(const Instruction& instruction, const Transfer& transfer,
                 int64_t ranks);

}  // namespace tessera::program::detail
