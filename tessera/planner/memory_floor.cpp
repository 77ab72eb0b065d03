#include "tessera/planner/memory_floor.h"

#include <algorithm>
#include <limits>

namespace tessera::planner {
namespace {

using Part = engine::WholeModel::Part;

int64_t size_of(at::ScalarType type) {
  return static_cast<int64_t>(c10::elementSize(type));
}

bool keeps_inputs(const std::string& mode) {
  return mode == "none" || mode == "selective" || mode == "block";
}

}  // namespace

MemoryFloor::MemoryFloor(const engine::RunConfig& base,
                         const engine::RunConfig& completed, int64_t world_size)
    : model_(engine::whole_model(completed)),
      weight_(size_of(completed.precision.compute_dtype())),
      gradient_(size_of(completed.precision.gradient_dtype())),
      in_files_(completed.zero.offloads()),
      cuts_experts_(base.mesh.etp > 1),
      keeps_inputs_(keeps_inputs(base.recompute.mode)),
      zero_(base.zero),
      world_size_(world_size),
      samples_(base.batch.global),
      sample_(weight_ * base.model.hidden * base.data.seq_len) {}

int64_t MemoryFloor::of(const Layout& layout) const {
  if (in_files_) return 0;
  return states_of(layout) + whole_block_of(layout) + inputs_of(layout);
}

int64_t MemoryFloor::data_ranks(const Layout& layout) const {
  return world_size_ / (layout.pp * layout.tp * layout.cp);
}

// Along cp there are copies, and along dp_replicate.
MemoryFloor::Places MemoryFloor::places_of(const Layout& layout) const {
  const int64_t shards =
      layout.dp_shard > 0 ? layout.dp_shard : data_ranks(layout);
  return {layout.tp, layout.tp * shards};
}

MemoryFloor::Places MemoryFloor::places_of_experts(const Layout& layout) const {
  return {layout.ep * (cuts_experts_ ? layout.tp : 1), world_size_ / layout.pp};
}

int64_t MemoryFloor::stage_of_experts(const Layout& layout) const {
  auto zero = zero_;
  zero.stage = layout.zero_stage;
  return zero.stage_of_experts();
}

// Weights are whole below stage 3, gradients below stage 2.
int64_t MemoryFloor::states_of(const Layout& layout) const {
  const auto states = [&](const Part& part, int64_t stage, Places places) {
    return part.elements * weight_ /
               (stage == 3 ? places.sharded : places.whole) +
           part.trained * gradient_ /
               (stage >= 2 ? places.sharded : places.whole) +
           part.optimizer_bytes / (stage >= 1 ? places.sharded : places.whole);
  };
  return (states(model_.all.others, layout.zero_stage, places_of(layout)) +
          states(model_.all.experts, stage_of_experts(layout),
                 places_of_experts(layout))) /
         layout.pp;
}

// Stages between the first and the last have a block at least, and of few one
// has; they go back through it.
int64_t MemoryFloor::whole_block_of(const Layout& layout) const {
  // How much is shared out, the user has said.
  if (layout.dp_shard == 0 || zero_.expert_shard != "all") return 0;
  // Weights and gradients need not be whole at once (zero-bubble schedules).
  const auto whole = [&](const Part& part, int64_t stage, Places places) {
    if (places.sharded == places.whole) return int64_t{0};  // it always is
    return std::max(stage == 3 ? part.elements * weight_ : 0,
                    stage >= 2 ? part.trained * gradient_ : 0) /
           places.whole;
  };
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& block : model_.blocks) {
    // Each by itself: they need not be whole at once.
    least = std::min(
        least,
        std::max(whole(block.others, layout.zero_stage, places_of(layout)),
                 whole(block.experts, stage_of_experts(layout),
                       places_of_experts(layout))));
  }
  return least * std::max<int64_t>(1, layout.pp - 2) / layout.pp;
}

// Of micro-batches that are under way: in stage s of p min(p - s, m) at least.
// Where a cut leaves no block to the first stage, and to the others one each,
// the last one, with the rest, keeps the fewest: of one micro-batch.
int64_t MemoryFloor::inputs_of(const Layout& layout) const {
  if (!keeps_inputs_) return 0;
  const int64_t batches = samples_ / (data_ranks(layout) * layout.micro);
  auto kept = static_cast<int64_t>(model_.blocks.size());
  const bool is_known = !layout.schedule.empty();
  for (int64_t stage = 1; stage < layout.pp - 1 && is_known; ++stage) {
    kept += std::min(layout.pp - stage, batches) - 1;
  }
  return kept * layout.micro * sample_ / (layout.cp * layout.tp * layout.pp);
}

}  // namespace tessera::planner
