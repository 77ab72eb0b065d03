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
#include "tessera/parallel/model_units.h"
#include "tessera/program/checker.h"

namespace tessera::engine {

// Of the ranks of one stage. `without`: passes that are left out.
program::Program lowered_program(const RunConfig& config,
                                 const mesh::DeviceMesh& mesh,
                                 const parallel::ModelUnits& model,
                                 int64_t stage, program::Kind kind,
                                 const std::vector<std::string>& without = {});

// Those that the environment variable TESSERA_WITHOUT_PASSES names, separated
// by commas: to see what a pass is worth, and that it changes no bit. Refuses
// what is no optional pass.
std::vector<std::string> passes_left_out();

class StepPrograms {
 public:
  // Those of these kinds. REQUIRES: a completed configuration. `without` as
  // above.
  StepPrograms(const RunConfig& config, const mesh::DeviceMesh& mesh,
               const parallel::ModelUnits& model,
               const std::vector<program::Kind>& kinds,
               const std::vector<std::string>& without = {});

  const program::Program& of(int64_t rank, program::Kind kind) const;

 private:
  void prove(program::Kind kind) const;

  const RunConfig& config_;
  const mesh::DeviceMesh& mesh_;
  const parallel::ModelUnits& model_;
  std::map<program::Kind, std::vector<program::Program>> programs_;  // by stage
};

}  // namespace tessera::engine
