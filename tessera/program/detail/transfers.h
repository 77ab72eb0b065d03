// What an instruction does on groups.
#pragma once

#include <vector>

#include "tessera/program/world.h"

namespace tessera::program::detail {

// In their order; nothing of an await, whose begin has them.
const std::vector<Transfer>& transfers_of(const RankProgram& of,
                                          const Instruction& instruction);
// Of an all_gather that an instruction is, `elements` are this rank's piece; of
// one inside of a unit they are the whole, as facts count them.
bool counts_pieces(const Instruction& instruction);

}  // namespace tessera::program::detail
