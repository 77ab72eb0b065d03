// The programs of a step and of an evaluation, of every rank of the mesh:
// proved together before the first one runs.
//
// Comm:   none: every rank makes and proves the same.
// Errors: TORCH_INTERNAL_ASSERT, of the checkers: a programmer's error.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/parallel/compose.h"
#include "tessera/program/checker.h"

namespace tessera::engine {

class StepPrograms {
 public:
  // `without`: passes that are left out. REQUIRES: a completed configuration.
  StepPrograms(const RunConfig& config, const parallel::Composed& composed,
               const std::vector<std::string>& without = {});

  const program::Program& of(int64_t rank, program::Kind kind) const;

 private:
  program::Program lowered(int64_t stage, program::Kind kind,
                           const std::vector<std::string>& without) const;
  void prove(program::Kind kind) const;

  const RunConfig& config_;
  const parallel::Composed& composed_;
  std::map<program::Kind, std::vector<program::Program>> programs_;  // by stage
};

}  // namespace tessera::engine
