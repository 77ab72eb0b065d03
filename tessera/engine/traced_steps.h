// Steps that ranks were seen to run, as the instructions of their programs.
#pragma once

#include <optional>
#include <vector>

#include "tessera/monitor/report/run_trace.h"
#include "tessera/program/instruction.h"

namespace tessera::engine {

// By rank.
using TracedRanks = std::vector<std::vector<monitor::report::TracedStep>>;

// What the recorder made this span of; nothing where it is of no instruction.
std::optional<program::Instruction> instruction_of(const monitor::Span& span);

}  // namespace tessera::engine
