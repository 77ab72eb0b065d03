#include "tessera/engine/model_cut.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/engine/detail/cut_costs.h"
#include "tessera/parallel/pipeline/cut.h"
#include "tessera/parallel/pipeline/stages.h"

namespace tessera::engine {

namespace pipeline = parallel::pipeline;
using detail::CutCosts;
using mesh::Axis;
using pipeline::UnitCosts;

namespace {

void check_speeds(const RunConfig& config, const mesh::DeviceMesh& mesh) {
  const auto& speeds = config.mesh.speeds;
  TS_CHECK_CONFIG(
      !config.mesh.star() || (speeds.empty() && !config.mesh.measure_speeds),
      speeds.empty() ? "mesh.measure_speeds is true" : "mesh.speeds is set",
      ", but with mesh.data_parallel dp devices are threads of one "
      "process, whose shares are even. Leave it out, or use "
      "mesh.data_parallel ddp.");
  TS_CHECK_CONFIG(speeds.empty() || std::ssize(speeds) == mesh.world_size(),
                  "mesh.speeds has ", speeds.size(),
                  " numbers, but the world has ", mesh.world_size(),
                  mesh.world_size() == 1 ? " rank" : " ranks",
                  ": it has one for each. Give ", mesh.world_size(),
                  ", or leave it out where all are alike.");
}

// By stage, and by data-parallel rank and stage: of the slowest rank there.
class Speeds {
 public:
  Speeds(const std::vector<double>& of_ranks, const mesh::DeviceMesh& mesh)
      : stages_(mesh.degree(Axis::kPp)),
        at_(mesh.degree(Axis::kDpReplicate) * mesh.degree(Axis::kDpShard),
            std::vector<double>(stages_, INFINITY)) {
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      const mesh::Coord coord = mesh.coord_of(static_cast<int64_t>(rank));
      double& slowest = at_.at(mesh.data_rank_of(coord)).at(coord[Axis::kPp]);
      slowest = std::min(slowest, of_ranks[rank]);
    }
  }

  std::vector<double> of_stages() const {
    std::vector<double> slowest(stages_, INFINITY);
    for (const auto& column : at_) {
      for (int64_t stage = 0; stage < stages_; ++stage) {
        slowest[stage] = std::min(slowest[stage], column[stage]);
      }
    }
    return slowest;
  }

  // With so much to do in each stage.
  std::vector<double> of_data_ranks(const std::vector<double>& loads) const {
    std::vector<double> speeds;
    for (const auto& column : at_) {
      double slowest = INFINITY;
      for (int64_t stage = 0; stage < stages_; ++stage) {
        slowest = std::min(slowest, column[stage] / loads.at(stage));
      }
      speeds.push_back(slowest);
    }
    return speeds;
  }

 private:
  int64_t stages_;
  std::vector<std::vector<double>> at_;
};

void choose_split(RunConfig& config, const mesh::DeviceMesh& mesh,
                  const CutCosts& by) {
  auto& of = config.pipeline;
  pipeline::CutRules rules{.pipeline = of.pipeline(mesh.degree(Axis::kPp)),
                           .bare_ends = of.cut != "layers"};
  if (!by.speeds.empty()) {
    rules.speeds = Speeds(by.speeds, mesh).of_stages();
  }
  if (of.cut == "layers" && !mesh::differ(rules.speeds)) return;  // evenly
  of.split = pipeline::balanced_split(by.units, rules);
  of.is_split_chosen = true;
  if (!of.cuts_by_run()) return;
  of.seconds_seen = by.units.time;
  if (config.mesh.speeds.empty()) of.speeds_seen = by.speeds;
}

// Of data-parallel ranks.
std::vector<double> speeds_with(const RunConfig& config,
                                const mesh::DeviceMesh& mesh,
                                const UnitCosts& costs) {
  const auto loads = pipeline::loads_of(
      costs, config.pipeline.pipeline(mesh.degree(Axis::kPp)),
      layers_of_parts(config));
  return Speeds(config.mesh.speeds, mesh).of_data_ranks(loads);
}

// `speeds`: of data-parallel ranks; none: all alike.
void choose_rows(RunConfig& config, std::vector<double> speeds) {
  if (speeds.empty() && !has_uneven_batch(config)) return;
  if (speeds.empty()) speeds.assign(data_parallel_degree(config), 1);
  auto rows = shares_by_speed(samples_of_microbatch(config), speeds);
  const bool is_even = std::ranges::all_of(
      rows, [&](int64_t each) { return each == config.batch.micro; });
  if (!is_even) config.batch.rows = std::move(rows);
}

}  // namespace

void share_out(RunConfig& config, const mesh::DeviceMesh& mesh) {
  check_speeds(config, mesh);
  config.batch.rows.clear();
  const bool cuts = mesh.degree(Axis::kPp) > 1 && config.pipeline.split.empty();
  const bool shares = data_parallel_degree(config) > 1 && config.mesh.uneven();
  const bool is_even = config.pipeline.cut == "layers" && !config.mesh.uneven();
  std::vector<double> speeds;
  if ((cuts || shares) && !is_even) {
    // A split may be what the same cut led to before: samples are shared out by
    // it again. What no part is chosen by is not asked for: a run's folder may
    // be gone by then.
    RunConfig alone = config;
    if (!cuts && config.pipeline.cuts_by_run()) alone.pipeline.cut = "facts";
    if (mesh.degree(Axis::kPp) == 1) alone.pipeline.cut = "layers";
    const CutCosts by = detail::cut_costs(alone, mesh);
    if (cuts) choose_split(config, mesh, by);
    if (shares) speeds = speeds_with(config, mesh, by.units);
  }
  choose_rows(config, std::move(speeds));
}

std::vector<int64_t> layers_of_parts(const RunConfig& config) {
  const auto& of = config.pipeline;
  const auto runs = pipeline::units_of_runs(
      config.model.layers, of.pipeline(config.mesh.pp).num_runs(), of);
  std::vector<int64_t> layers;
  for (const auto& run : runs) layers.push_back(std::ssize(run));
  --layers.front();
  --layers.back();
  return layers;
}

std::vector<int64_t> shares_by_speed(int64_t total,
                                     const std::vector<double>& speeds) {
  const double sum = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  const auto count = std::ssize(speeds);
  TORCH_INTERNAL_ASSERT(total >= count, total, " things for ", count);
  // What everybody has by the time when all but `count` are shared out.
  const double time = static_cast<double>(total - count) / sum;
  std::vector<int64_t> shares;
  for (const double speed : speeds) {
    shares.push_back(
        std::max<int64_t>(1, static_cast<int64_t>(std::floor(time * speed))));
  }
  int64_t left =
      total - std::accumulate(shares.begin(), shares.end(), int64_t{0});
  const auto end_with_one_more = [&](size_t i) {
    return std::pair(static_cast<double>(shares[i] + 1) / speeds[i],
                     -speeds[i]);
  };
  for (; left > 0; --left) {
    size_t next = 0;
    for (size_t i = 1; i < shares.size(); ++i) {
      if (end_with_one_more(i) < end_with_one_more(next)) next = i;
    }
    ++shares[next];
  }
  return shares;
}

}  // namespace tessera::engine
