#include "tessera/parallel/expert/expert_facts.h"

#include <cmath>
#include <utility>
#include <vector>

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
Traced run_sorted(const Operators& ops, const Traced& came,
                  const models::ModelConfig& model, int64_t experts,
                  const models::trace::RunExperts& run) {
  const int64_t rows = came.numel / model.hidden;
  const Memory order = ops.numbers(rows);
  const Traced sorted = ops.index_select(came, came.numel, order);
  const Traced outputs = run(sorted, experts);
  return ops.index_select(outputs, came.numel, ops.numbers(rows));
}

// Of so many rows those that are for these of a rank's experts, in elements.
int64_t part_of(int64_t rows, const mesh::Range& range, int64_t experts,
                int64_t width) {
  return (rows * range.end / experts - rows * range.begin / experts) * width;
}

// Of rows, of which so many come.
Traced dispatch_in_chunks(const Operators& ops, const Traced& rows,
                          int64_t received, const models::ModelConfig& model,
                          const Ranks& ranks,
                          const std::vector<mesh::Range>& chunks,
                          const models::trace::RunExperts& run,
                          const std::function<void()>& beside) {
  const int64_t here = model.moe.experts / ranks.size;
  std::vector<int64_t> leave, come;
  for (const mesh::Range& range : chunks) {
    leave.push_back(
        part_of(rows.numel / model.hidden, range, here, model.hidden));
    come.push_back(part_of(received, range, here, model.hidden));
  }
  std::vector<Operators::Travelling> leaving, returning;
  auto parts = ops.parted(rows, leave);
  for (size_t i = 0; i < chunks.size(); ++i) {
    leaving.push_back(
        ops.start_all_to_all(std::exchange(parts[i], {}), come[i], ranks));
  }
  beside();
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Traced came =
        ops.finish_all_to_all(std::exchange(leaving[i], {}), ranks);
    returning.push_back(ops.start_all_to_all(
        run_sorted(ops, came, model, chunks[i].size(), run), leave[i], ranks));
  }
  std::vector<Traced> home;
  for (auto& each : returning) {
    home.push_back(ops.finish_all_to_all(std::exchange(each, {}), ranks));
  }
  return ops.put_together(home);
}

Traced traced_dispatch(const Operators& ops, const Traced& rows,
                       const models::ModelConfig& model, const Ranks& ranks,
                       const TracedOptions& options,
                       const models::trace::RunExperts& run,
                       const std::function<void()>& beside) {
  const int64_t sent = rows.numel / model.hidden;
  const int64_t received =
      std::llround(options.received_rows * static_cast<double>(sent));
  const int64_t all_bytes = kNumberBytes * ranks.size * model.moe.experts;
  const Memory all = ops.bytes(all_bytes);
  ops.tape().collective("all_gather", ranks.axes, all_bytes);
  const int64_t here = model.moe.experts / ranks.size;
  if (options.dispatch_chunks > 0) {
    return dispatch_in_chunks(ops, rows, received, model, ranks,
                              expert_chunks(here, options.dispatch_chunks), run,
                              beside);
  }
  const Traced came = ops.all_to_all(rows, received * model.hidden, ranks,
                                     /*copied_back=*/false);
  const Traced back = run_sorted(ops, came, model, here, run);
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
    shard.dispatch = [ep, config = model.config, options](
                         const Operators& ops, const Traced& rows,
                         const models::trace::RunExperts& run,
                         const std::function<void()>& beside) {
      return traced_dispatch(ops, rows, config, ep, options, run, beside);
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
  std::vector<Axis> axes = options.sample_axes;
  const bool over_tp = mesh.degree(Axis::kTp) > 1;
  if (over_tp && whole_experts) {
    axes.push_back(Axis::kTp);
    if (!options.sequence_parallel) {
      shard.split = models::trace::along(mesh, {Axis::kTp});
      shard.split_rank = coord[Axis::kTp];
    }
  }
  share_samples(axes);
  if (over_tp && !whole_experts) shard.region = options.region;
}

}  // namespace tessera::parallel::expert
