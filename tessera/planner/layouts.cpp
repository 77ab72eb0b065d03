#include "tessera/planner/layouts.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "tessera/mesh/axis.h"
#include "tessera/models/model.h"
#include "tessera/parallel/tensor/tensor_parallel.h"
#include "tessera/program/costs.h"
#include "tessera/program/schedules/schedule.h"

namespace tessera::planner {
namespace {

namespace schedules = program::schedules;
using engine::RunConfig;
using mesh::Axis;

std::vector<int64_t> divisors_of(int64_t number, int64_t most) {
  std::vector<int64_t> found;
  for (int64_t i = 1; i <= std::min(number, most); ++i) {
    if (number % i == 0) found.push_back(i);
  }
  return found;
}

// How a pipeline's micro-batches are scheduled.
struct Schedule {
  const char* name;
  int64_t chunks;
  bool has_bubble;  // (p - 1) / chunks micro-batches, of equal stages
};
constexpr Schedule kSchedules[] = {
    {"1f1b", 1, true},   {"interleaved", 2, true}, {"interleaved", 4, true},
    {"zb_h1", 1, false}, {"zb_v", 2, false},
};

// One that is looked at: what it takes, and pipeline.chunks.
struct Choice {
  schedules::Schedule schedule;
  int64_t chunks;
  bool has_bubble;
  int64_t key;
};

// `chunks`: the user's pipeline.chunks, with which each is there once; 0: as
// many as a schedule needs.
std::vector<Choice> choices_of(std::optional<int64_t> chunks) {
  std::vector<Choice> choices;
  for (const Schedule& each : kSchedules) {
    Choice choice{schedules::named(each.name), each.chunks, each.has_bubble,
                  each.chunks > 1 ? each.chunks : 0};
    if (chunks) {
      const int64_t own =
          *chunks > 0 ? *chunks : schedules::usual_chunks(choice.schedule);
      if ((own > 1) != (each.chunks > 1)) continue;
      choice.chunks = own;
      choice.key = *chunks;
    }
    const bool is_there = std::ranges::any_of(choices, [&](const Choice& one) {
      return one.schedule.name == each.name && one.chunks == choice.chunks;
    });
    if (!is_there) choices.push_back(std::move(choice));
  }
  return choices;
}

// What 1f1b of p stages takes for m micro-batches at least, however the model
// is cut, of what each stage computes where they are equal. Stage s of time t_s
// waits for the first micro-batch to come and for the last to go back:
//   X >= m t_s + a P_s,   P_s = t_0 + ... + t_(s-1)
// with a the part that cannot wait. All are equal for the least X:
//   a T / (1 - (1 - a / m)^p),   T = P_p
double least_of_1f1b(int64_t stages, double micro_batches, double at_once) {
  const auto p = static_cast<double>(stages);
  const double a = at_once / micro_batches;
  return a * p / (1 - std::pow(1 - a, p));
}

// On CPUs gradients of weights may wait for others (nn/weight_queue.h), the
// third of three products.
double part_at_once(const Cluster& cluster) {
  return cluster.device.kind == "cpu" ? 2.0 / 3 : 1;
}

class Layouts {
 public:
  Layouts(const RunConfig& base, const Cluster& cluster, int64_t world_size,
          const IsSet& is_set)
      : base_(base),
        cluster_(cluster),
        world_size_(world_size),
        is_set_(is_set),
        parameters_(
            static_cast<double>(models::count_parameters(base.model).all)),
        flops_(base),
        seconds_per_flop_(
            static_cast<double>(base.batch.global * base.data.seq_len) /
            (static_cast<double>(world_size) * cluster.flops() *
             mean_speed_of(base))),
        element_bytes_(static_cast<double>(
            c10::elementSize(base.precision.compute_dtype()))),
        order_(mesh::MeshConfig{.order = base.mesh.order}
                   .mesh(/*world_size=*/1, /*zero_stage=*/0)
                   .order()),
        choices_(choices_of(is_set("pipeline.chunks")
                                ? std::optional(base.pipeline.chunks)
                                : std::nullopt)) {}

  std::vector<Layout> all() {
    const int64_t blocks = base_.model.num_blocks();
    for (const int64_t pp :
         choose("mesh.pp", base_.mesh.pp, divisors_of(world_size_, blocks))) {
      each_tp({.pp = pp});
    }
    std::ranges::stable_sort(found_, {}, &Layout::guess);
    return std::move(found_);
  }

 private:
  // What is tried: all of these, or what the user has set.
  std::vector<int64_t> choose(const std::string& key, int64_t own,
                              std::vector<int64_t> all) const {
    if (is_set_(key)) return {own};
    return all;
  }

  void each_tp(Layout layout) {
    const int64_t rest = world_size_ / layout.pp;
    for (const int64_t tp :
         choose("mesh.tp", base_.mesh.tp,
                divisors_of(rest, cluster_.devices_per_node))) {
      if (base_.model.heads % tp != 0) continue;
      layout.tp = tp;
      for (const int64_t cp :
           choose("mesh.cp", base_.mesh.cp, divisors_of(rest / tp, 64))) {
        if (cp > 1 && base_.data.seq_len % (2 * cp) != 0) continue;
        layout.cp = cp;
        const int64_t dp = rest / (tp * cp);
        if (dp == 0 || layout.pp * tp * cp * dp != world_size_ ||
            base_.batch.global % dp != 0) {
          continue;
        }
        each_ep(layout, dp);
      }
    }
  }

  void each_ep(Layout layout, int64_t dp) {
    const int64_t experts = base_.model.moe.experts;
    const int64_t ranks = dp * layout.cp * layout.tp;  // of a stage
    for (const int64_t ep :
         choose("mesh.ep", base_.mesh.ep,
                experts == 0 ? std::vector<int64_t>{1}
                             : divisors_of(ranks, experts))) {
      if (experts > 0 && experts % ep != 0) continue;
      layout.ep = ep;
      each_shard(layout, dp);
    }
  }

  void each_shard(Layout layout, int64_t dp) {
    const auto stages =
        dp == 1 ? std::vector<int64_t>{0} : std::vector<int64_t>{1, 2, 3};
    const bool is_laid_out = is_set_("mesh.dp") || is_set_("mesh.dp_shard") ||
                             is_set_("mesh.dp_replicate");
    const int64_t in_node = cluster_.devices_per_node / (layout.tp * layout.cp);
    for (const int64_t stage : choose("zero.stage", base_.zero.stage, stages)) {
      layout.zero_stage = stage;
      layout.dp_replicate = layout.dp_shard = 0;
      if (!is_laid_out) {
        layout.dp_replicate = stage == 0 ? dp : 1;
        layout.dp_shard = dp / layout.dp_replicate;
      }
      each_batch(layout, dp);
      // Inside a node, replicated over nodes.
      if (is_laid_out || stage == 0 || in_node < 2 || in_node >= dp ||
          dp % in_node != 0) {
        continue;
      }
      layout.dp_shard = in_node;
      layout.dp_replicate = dp / in_node;
      each_batch(layout, dp);
    }
  }

  void each_batch(Layout layout, int64_t dp) {
    constexpr int64_t kMostMicro = 64;
    const int64_t share = base_.batch.global / dp;
    std::vector<int64_t> sizes;
    for (int64_t micro = 1; micro <= std::min(share, kMostMicro); micro *= 2) {
      if (share % micro == 0) sizes.push_back(micro);
    }
    const int64_t own = base_.batch.micro == 0 ? share : base_.batch.micro;
    const auto along = links_of(layout, dp);
    for (const int64_t micro : choose("batch.micro", own, std::move(sizes))) {
      if (share % micro != 0) continue;
      layout.micro = micro;
      each_schedule(layout, share / micro, along);
    }
  }

  // What the groups of a layout's ranks are: how many, over which link.
  struct Group {
    int64_t ranks = 1;
    program::Link link;
  };
  struct Groups {
    Group tp, cp, shard, replicate;
  };

  Groups links_of(const Layout& layout, int64_t dp) const {
    const int64_t replicate = layout.dp_replicate > 0 ? layout.dp_replicate : 1;
    const mesh::DeviceMesh mesh({.pp = layout.pp,
                                 .dp_replicate = replicate,
                                 .dp_shard = dp / replicate,
                                 .cp = layout.cp,
                                 .tp = layout.tp},
                                world_size_, order_);
    const auto group = [&](Axis axis) {
      const int64_t ranks = mesh.degree(axis);
      if (ranks == 1) return Group{};
      return Group{ranks, link_of(cluster_.link_along(axis, mesh))};
    };
    return {group(Axis::kTp), group(Axis::kCp), group(Axis::kDpShard),
            group(Axis::kDpReplicate)};
  }

  void each_schedule(Layout layout, int64_t micro_batches,
                     const Groups& groups) {
    if (layout.pp == 1 || is_set_("pipeline.schedule")) {
      layout.chunks = base_.pipeline.chunks;
      return add(layout, micro_batches, groups, /*has_bubble=*/false);
    }
    for (const Choice& each : choices_) {
      if (base_.model.num_blocks() < layout.pp * each.chunks) continue;
      if (!schedules::takes(each.schedule,
                            {.stages = layout.pp,
                             .chunks = each.chunks,
                             .num_microbatches = micro_batches})) {
        continue;
      }
      layout.schedule = each.schedule.name;
      layout.chunks = each.key;
      add(layout, micro_batches, groups, each.has_bubble);
    }
  }

  static double time_of(const char* verb, const Group& group, double bytes) {
    return program::time_of(verb, group.ranks, bytes, group.link);
  }

  void add(Layout layout, int64_t micro_batches, const Groups& groups,
           bool has_bubble) {
    const auto count = static_cast<double>(micro_batches);
    const double blocks = count *
                          static_cast<double>(base_.model.num_blocks()) /
                          static_cast<double>(layout.pp);
    const double rows = static_cast<double>(layout.micro * base_.data.seq_len) /
                        static_cast<double>(layout.cp);
    const double activations =
        rows * static_cast<double>(base_.model.hidden) * element_bytes_;
    // Attention is summed over tp forward and backward, and so are MLPs;
    // experts' rows go ways of their own.
    const double sums = base_.model.moe.experts > 0 ? 2 : 4;
    const double work = seconds_per_flop_ * flops_.of_pieces(layout.cp);
    layout.bound = layout.guess =
        work + sums * blocks * time_of("all_reduce", groups.tp, activations);
    if (has_bubble) {
      const auto chunks =
          static_cast<double>(std::max<int64_t>(1, layout.chunks));
      layout.guess *= 1 + static_cast<double>(layout.pp - 1) / (chunks * count);
      // Chunks may be cut so that the first ones keep nobody waiting.
      if (chunks == 1) {
        layout.bound *= least_of_1f1b(layout.pp, count, part_at_once(cluster_));
      }
    }
    // What is moved, and a bubble, may be those of fast ranks.
    if (base_.mesh.uneven()) layout.bound = work;
    const double whole = activations * static_cast<double>(layout.cp);
    const double held = parameters_ * element_bytes_ /
                        static_cast<double>(layout.pp * layout.tp * layout.ep);
    layout.guess += 2 * blocks * time_of("all_gather", groups.cp, 2 * whole) +
                    time_of("all_reduce", groups.shard, held) +
                    time_of("all_reduce", groups.replicate,
                            held / static_cast<double>(groups.shard.ranks));
    if (layout.zero_stage == 3) {
      layout.guess +=
          (2 * count - 1) * time_of("all_gather", groups.shard, held);
    }
    found_.push_back(std::move(layout));
  }

  const RunConfig& base_;
  const Cluster& cluster_;
  const int64_t world_size_;
  const IsSet& is_set_;
  const double parameters_;
  const TokenFlops flops_;
  // Of a step for each operation a token, shared out; of an activation.
  const double seconds_per_flop_, element_bytes_;
  const std::vector<Axis> order_;
  const std::vector<Choice> choices_;
  std::vector<Layout> found_;
};

}  // namespace

RunConfig Layout::of(const RunConfig& base, const IsSet& is_set) const {
  RunConfig config = base;
  config.mesh.pp = pp;
  config.mesh.tp = tp;
  config.mesh.cp = cp;
  config.mesh.ep = ep;
  if (dp_shard > 0) {
    config.mesh.dp = 0;
    config.mesh.dp_replicate = dp_replicate;
    config.mesh.dp_shard = dp_shard;
  }
  config.zero.stage = zero_stage;
  config.batch.micro = micro;
  if (tp > 1 && !is_set("tensor.sequence_parallel")) {
    config.tensor.sequence_parallel =
        parallel::tensor::cuts_evenly(base.data.seq_len, cp, tp);
  }
  if (!schedule.empty()) config.pipeline.schedule = schedule;
  config.pipeline.chunks = chunks;
  if (pp > 1 && !is_set("pipeline.cut") && !is_set("pipeline.split")) {
    config.pipeline.cut = "facts";
  }
  return config;
}

std::vector<Layout> layouts_of(const RunConfig& base, const Cluster& cluster,
                               int64_t world_size, const IsSet& is_set) {
  return Layouts(base, cluster, world_size, is_set).all();
}

double mean_speed_of(const RunConfig& base) {
  const auto& speeds = base.mesh.speeds;
  if (!base.mesh.uneven()) return 1;
  return std::accumulate(speeds.begin(), speeds.end(), 0.0) /
         static_cast<double>(speeds.size());
}

std::string schedule_text(const RunConfig& config) {
  const auto& pipeline = config.pipeline;
  if (pipeline.chunks <= 1) return pipeline.schedule;
  return c10::str(pipeline.schedule, " of ", pipeline.chunks, " chunks");
}

TokenFlops::TokenFlops(const RunConfig& base) {
  const auto flops_at = [&](int64_t seq_len) {
    return static_cast<double>(models::flops_per_token(base.model, seq_len));
  };
  const int64_t tokens = base.data.seq_len;
  all = flops_at(tokens);
  if (tokens > 1) {
    attention = (all - flops_at(1)) * static_cast<double>(tokens) /
                static_cast<double>(tokens - 1);
  }
  head = 6.0 * static_cast<double>(base.model.hidden) *
         static_cast<double>(base.model.vocab) *
         static_cast<double>(1 + base.model.mtp.layers);
}

double TokenFlops::of_pieces(int64_t cp) const {
  if (cp == 1) return all;
  return all - attention * (1 - 1 / (2.0 * static_cast<double>(cp))) / 2;
}

double TokenFlops::recompute_factor(const std::string& mode,
                                    int64_t every) const {
  if (mode != "block") return 1;
  // The head is not computed again, at any depth.
  const double blocks = std::max(0.0, 1 - head / all);
  return 1 + blocks / 3 / static_cast<double>(std::max<int64_t>(1, every));
}

}  // namespace tessera::planner
