#include "tessera/parallel/expert/expert_facts.h"

#include <cmath>

#include "tessera/mesh/layout.h"
#include "tessera/parallel/expert/expert_parallel.h"

namespace tessera::parallel::expert {
namespace {

using mesh::Axis;
using models::trace::Memory;
using models::trace::Operators;
using models::trace::Ranks;
using models::trace::Traced;

constexpr int64_t kNumberBytes = 8;

// Rows come by source, are sorted by expert, and put back.
Traced dispatch(const Operators& ops, const Traced& rows,
                const models::ModelConfig& model, const Ranks& ranks,
                double received_rows, const models::trace::RunExperts& run) {
  const int64_t sent_rows = rows.numel / model.hidden;
  const int64_t num_rows =
      std::llround(received_rows * static_cast<double>(sent_rows));
  const int64_t numel = num_rows * model.hidden;
  const int64_t all_bytes = kNumberBytes * ranks.size * model.moe.experts;
  const Memory all = ops.bytes(all_bytes);
  ops.tape().collective("all_gather", ranks.axes, all_bytes);
  const Traced came = ops.all_to_all(rows, numel, ranks, /*copied_back=*/false);
  const Memory order = ops.numbers(num_rows);
  const Traced sorted = ops.index_select(came, numel, order);
  const Traced outputs = run(sorted);
  const Traced back = ops.index_select(outputs, numel, ops.numbers(num_rows));
  return ops.all_to_all(back, rows.numel, ranks, /*copied_back=*/false);
}

}  // namespace

void apply(models::trace::TracedModel& model, const TracedOptions& options,
           const mesh::DeviceMesh& mesh, const mesh::Coord& coord) {
  if (model.config.layers_with_experts() == 0) return;
  const int64_t etp = mesh.degree(Axis::kEtp);
  const bool whole_experts = etp == 1;
  const Ranks ep = models::trace::along(mesh, {Axis::kEp});
  model.experts /= ep.size;
  model.expert_ffn =
      mesh::chunk_of(model.expert_ffn, etp, coord[Axis::kEtp]).size();
  models::trace::ExpertShard& shard = model.expert_shard;
  if (ep.size > 1) {
    shard.dispatch = [ep, config = model.config,
                      received = options.received_rows](
                         const Operators& ops, const Traced& rows,
                         const models::trace::RunExperts& run) {
      return dispatch(ops, rows, config, ep, received, run);
    };
  }
  using Sum = std::function<void(const Operators& ops, int64_t numel)>;
  const auto sum_over = [](const Ranks& ranks) -> Sum {
    return [ranks](const Operators& ops, int64_t numel) {
      ops.tape().collective("all_reduce", ranks.axes, numel * ops.wide());
    };
  };
  const auto share_samples = [&](const std::vector<Axis>& axes) {
    const Ranks batch = models::trace::along(mesh, axes_of_batch(axes));
    if (batch.size > 1) shard.sum_batch = sum_over(batch);
    const Ranks ranks = models::trace::along(mesh, axes);
    if (ranks.size == 1) return;
    shard.sum_samples = sum_over(ranks);
    shard.sample_parts = ranks.size;
    shard.gather_samples = [ranks](const Operators& ops, int64_t bytes) {
      ops.tape().collective("all_gather", ranks.axes, bytes);
    };
  };
  // The hidden states between blocks are this rank's own tokens already.
  if (options.sequence_parallel && whole_experts) {
    std::vector<Axis> axes = options.sample_axes;
    axes.push_back(Axis::kTp);
    share_samples(axes);
    return;
  }
  share_samples(options.sample_axes);
  if (mesh.degree(Axis::kTp) == 1) return;
  shard.copies = mesh.degree(Axis::kTp);
  shard.copy = coord[Axis::kTp];
  shard.shares_tokens = whole_experts;
  shard.region = options.region;
}

}  // namespace tessera::parallel::expert
