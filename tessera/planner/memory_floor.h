// What the fullest rank of a layout holds at least, by the sizes of the model
// alone: no model is made, so that of thousands of layouts that are too large
// few are laid out.
//
//   of(layout) <= max over stages of what a rank of it holds
//
// It is a mean over stages, whose fullest has no less: of what lies between
// steps, shared out as evenly as the layout allows; of the least that one of a
// stage's blocks is while its weights or gradients are whole; and of the inputs
// of blocks, which are kept whatever is computed again.
// Units: bytes.
#pragma once

#include <cstdint>

#include "tessera/engine/memory_plan.h"
#include "tessera/engine/run_config.h"
#include "tessera/planner/layouts.h"

namespace tessera::planner {

class MemoryFloor {
 public:
  // `completed`: `base` in any layout, of so many ranks.
  MemoryFloor(const engine::RunConfig& base, const engine::RunConfig& completed,
              int64_t world_size);
  int64_t of(const Layout& layout) const;

 private:
  // Ranks of a stage in different places: of weights alone, and of what all
  // axes of data share out too.
  struct Places {
    int64_t whole = 1, sharded = 1;
  };
  int64_t data_ranks(const Layout& layout) const;
  Places places_of(const Layout& layout) const;
  Places places_of_experts(const Layout& layout) const;
  int64_t stage_of_experts(const Layout& layout) const;
  int64_t states_of(const Layout& layout) const;
  int64_t whole_block_of(const Layout& layout) const;
  int64_t inputs_of(const Layout& layout) const;

  engine::WholeModel model_;
  int64_t weight_, gradient_;  // of an element
  bool in_files_, cuts_experts_, keeps_inputs_;
  parallel::data::ZeroConfig zero_;
  int64_t world_size_, samples_;
  int64_t sample_;  // of its tokens, between two blocks
};

}  // namespace tessera::planner
