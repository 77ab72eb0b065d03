#include "tessera/planner/search.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/run_devices.h"
#include "tessera/engine/step_plan.h"
#include "tessera/planner/memory_floor.h"

namespace tessera::planner {
namespace {

using engine::RunConfig;

// A layout's value of each key that is searched.
std::vector<std::pair<std::string, std::string>> values_of(
    const RunConfig& config) {
  const auto& mesh = config.mesh;
  std::vector<std::pair<std::string, std::string>> values = {
      {"mesh.pp", std::to_string(mesh.pp)},
      {"mesh.tp", std::to_string(mesh.tp)},
      {"mesh.cp", std::to_string(mesh.cp)},
      {"mesh.ep", std::to_string(mesh.ep)},
      {"zero.stage", std::to_string(config.zero.stage)},
      {"batch.micro", std::to_string(config.batch.micro)},
      {"recompute.mode", config.recompute.mode}};
  if (mesh.pp > 1) {
    values.emplace_back("pipeline.schedule", schedule_text(config));
  }
  return values;
}

// What came of a layout.
struct Tried {
  std::optional<Plan> plan;
  std::string refusal;  // by a rule of the configuration
  double bound = 0;     // by which its last form was ruled out
  RunConfig config;     // of its last form
  int64_t bytes = 0;    // of that; 0: it was not looked at
};

class Searching {
 public:
  Searching(const RunConfig& base, const Cluster& cluster,
            const SearchOptions& options, const IsSet& is_set)
      : base_(base),
        cluster_(cluster),
        options_(options),
        is_set_(is_set),
        flops_(base),
        modes_(is_set("recompute.mode")
                   ? std::vector<std::string>{base.recompute.mode}
                   : std::vector<std::string>{"none", "selective", "block"}) {}

  Search run() {
    const auto layouts =
        layouts_of(base_, cluster_, options_.world_size, is_set_);
    found_.layouts = std::ssize(layouts);
    set_floor(layouts);
    auto next = layouts.begin();
    while (next != layouts.end()) {
      std::vector<const Layout*> wave;
      for (; next != layouts.end() && std::ssize(wave) < kAtOnce; ++next) {
        if (!is_ruled_out(*next)) wave.push_back(&*next);
      }
      auto results = all_tried(wave);
      for (size_t i = 0; i < wave.size(); ++i) {
        take(*wave[i], std::move(results[i]));
      }
      if (found_.plans.empty()) laid_out_ = 0;
      if (options_.progress) options_.progress(found_);
    }
    if (found_.plans.empty()) refuse();
    note_modes();
    return std::move(found_);
  }

 private:
  // Of any number of cores: what is ruled out must not depend on it.
  static constexpr int64_t kAtOnce = 8;

  // By the first layout that no rule forbids: the model is that of all.
  void set_floor(const std::vector<Layout>& layouts) {
    for (const Layout& layout : layouts) {
      RunConfig config = layout.of(base_, is_set_);
      if (!refusal_of(config).empty()) continue;
      floor_.emplace(base_, config, options_.world_size);
      return;
    }
  }

  // By its floor. What has no mesh is left to those who say why.
  bool is_above_memory(const Layout& layout) {
    const int64_t least = floor_ ? floor_->of(layout) : 0;
    if (least <= cluster_.memory_bytes()) return false;
    const RunConfig config = layout.of(base_, is_set_);
    const auto mesh = words_of_mesh(config);
    if (mesh.empty()) return false;
    ++found_.too_large;
    note(config, [](Outcome&) {});  // its values are there
    nearest_floor_.lower(least, mesh);
    return true;
  }

  // "": it has none.
  std::string words_of_mesh(const RunConfig& config) const {
    try {
      return mesh_of(config, options_.world_size).describe();
    } catch (const Error&) {
      return "";
    }
  }

  // Completes it; why no run can be so, or "".
  std::string refusal_of(RunConfig& config) const {
    try {
      complete(config, options_.world_size);
      config.run.device_types = {cluster_.device_type()};
      check_device(config);
      return "";
    } catch (const Error& error) {
      return message_of(error);
    }
  }

  // Also where as many as may be were looked at.
  bool is_ruled_out(const Layout& layout) {
    const double bound = bound_of(layout, modes_.front());
    if (bound >= slowest_of_the_best()) {
      ++found_.ruled_out;
      note_unseen(layout);
      return true;
    }
    if (is_above_memory(layout)) return true;
    // Nothing is said of what fits before all was looked at.
    if (laid_out_ >= options_.most && !found_.plans.empty()) {
      ++found_.left;
      lower(found_.left_bound_s, bound);
      note_unseen(layout);
      return true;
    }
    ++laid_out_;
    return false;
  }

  std::vector<Tried> all_tried(const std::vector<const Layout*>& wave) const {
    std::vector<Tried> results(wave.size());
    const double slowest = slowest_of_the_best();
    std::atomic<size_t> next = 0;
    const auto work = [&] {
      for (size_t i = next++; i < wave.size(); i = next++) {
        results[i] = tried(*wave[i], slowest);
      }
    };
    const size_t cores = std::max(1U, std::thread::hardware_concurrency());
    std::vector<std::future<void>> workers;
    for (size_t i = 0; i < std::min(cores, wave.size()); ++i) {
      workers.push_back(std::async(std::launch::async, work));
    }
    for (auto& each : workers) each.get();
    return results;
  }

  Tried tried(const Layout& layout, double slowest) const {
    Tried result;
    for (const auto& mode : modes_) {
      const double bound = bound_of(layout, mode);
      RunConfig config = layout.of(base_, is_set_);
      config.recompute.mode = mode;
      if (bound >= slowest) {
        result.bound = bound;
        result.config = std::move(config);
        break;
      }
      result.refusal = refusal_of(config);
      if (!result.refusal.empty()) break;
      const auto memory = engine::memory_plans(config);
      result.bytes = bytes_of(memory);
      if (result.bytes <= cluster_.memory_bytes()) {
        result.plan = simulated(std::move(config), memory, result.bytes);
        break;
      }
      result.config = std::move(config);
    }
    return result;
  }

  // Of a device, of the rank that needs the most.
  int64_t bytes_of(const std::vector<engine::MemoryPlan>& stages) const {
    const bool is_host = cluster_.device_type() == c10::kCPU;
    int64_t most = 0;
    for (const auto& stage : stages) {
      most = std::max(most, is_host ? stage.total() : stage.on_device());
    }
    return most;
  }

  double bound_of(const Layout& layout, const std::string& mode) const {
    return layout.bound * flops_.recompute_factor(mode, base_.recompute.every);
  }

  // It may have any mode of recomputation.
  void note_unseen(const Layout& layout) {
    const double bound = bound_of(layout, modes_.front());
    note(layout.of(base_, is_set_),
         [&](Outcome& outcome) { lower(outcome.bound_s, bound); });
    for (const auto& mode : modes_) {
      lower(least_of_modes_[mode], bound_of(layout, mode));
    }
  }

  // It was looked at with modes up to this one.
  void note_modes_behind(const Layout& layout, const std::string& seen) {
    bool is_behind = false;
    for (const auto& mode : modes_) {
      if (is_behind) lower(least_of_modes_[mode], bound_of(layout, mode));
      is_behind |= mode == seen;
    }
  }

  // Of modes that some layout needs.
  void note_modes() {
    for (auto& [mode, outcome] : found_.outcomes["recompute.mode"]) {
      const auto least = least_of_modes_.find(mode);
      if (least != least_of_modes_.end()) lower(outcome.bound_s, least->second);
    }
  }

  void take(const Layout& layout, Tried result) {
    if (result.plan) {
      ++found_.simulated;
      note_modes_behind(layout, result.plan->config.recompute.mode);
      keep(*std::move(result.plan));
    } else if (result.bound > 0) {
      ++found_.ruled_out;
      note(result.config,
           [&](Outcome& outcome) { lower(outcome.bound_s, result.bound); });
      note_modes_behind(layout, result.config.recompute.mode);
    } else if (result.bytes > 0) {
      ++found_.too_large;
      note(result.config,
           [&](Outcome& outcome) { lower(outcome.least_bytes, result.bytes); });
      nearest_.lower(result.bytes, words_of_mesh(result.config));
    } else {
      ++found_.refused;
      if (refusal_.empty()) refusal_ = result.refusal;
    }
  }

  Plan simulated(RunConfig config,
                 const std::vector<engine::MemoryPlan>& memory,
                 int64_t bytes) const {
    const auto mesh = mesh_of(config, options_.world_size);
    const auto step =
        engine::plan_steps(config, {cluster_.costs(mesh)}, memory).front();
    const auto tokens =
        static_cast<double>(config.batch.global * config.data.seq_len);
    Plan plan{.config = {},
              .mesh = mesh.describe(),
              .step_s = step.step,
              .tokens_per_s = tokens / step.step,
              .bubble = step.bubble,
              .peak_bytes = bytes};
    plan.mfu = plan.tokens_per_s * flops_.all /
               (static_cast<double>(options_.world_size) * cluster_.flops() *
                mean_speed_of(base_));
    for (const auto& stage : step.stages) {
      plan.exposed = std::max(plan.exposed, stage.times.exposed / step.step);
      plan.moved_bytes = std::max(plan.moved_bytes, stage.moved_bytes);
    }
    plan.config = std::move(config);
    return plan;
  }

  // Of each mesh the fastest, and of those the fastest; of equals the one that
  // holds less.
  void keep(Plan plan) {
    note(plan.config,
         [&](Outcome& outcome) { lower(outcome.best_s, plan.step_s); });
    const auto is_better = [](const Plan& one, const Plan& other) {
      return std::pair(one.step_s, one.peak_bytes) <
             std::pair(other.step_s, other.peak_bytes);
    };
    auto& plans = found_.plans;
    const auto same = std::ranges::find(plans, plan.mesh, &Plan::mesh);
    if (same == plans.end()) {
      plans.push_back(std::move(plan));
    } else if (is_better(plan, *same)) {
      *same = std::move(plan);
    }
    std::ranges::stable_sort(plans, is_better);
    if (std::ssize(plans) > options_.top) plans.resize(options_.top);
  }

  double slowest_of_the_best() const {
    return std::ssize(found_.plans) < options_.top
               ? std::numeric_limits<double>::infinity()
               : found_.plans.back().step_s;
  }

  template <typename Number>
  static void lower(Number& least, Number to) {
    if (least == 0 || to < least) least = to;
  }

  template <typename Change>
  void note(const RunConfig& config, const Change& change) {
    for (const auto& [key, value] : values_of(config)) {
      change(found_.outcomes[key][value]);
    }
  }

  [[noreturn]] void refuse() const {
    TS_CHECK_CONFIG(found_.layouts > 0, "plan: no mesh of ",
                    options_.world_size,
                    " ranks fits the model and batch.global: its data-parallel "
                    "degree must divide that (batch.uneven is not searched) "
                    "and batch.micro a rank's share, "
                    "mesh.tp model.heads, mesh.cp half of data.seq_len, and "
                    "all together the ranks. Use another --world or "
                    "batch.global, or set fewer keys.");
    TS_CHECK_CONFIG(
        found_.too_large > 0, "plan: each of the ", found_.layouts,
        " layouts of ", options_.world_size,
        " ranks is refused by a rule of the configuration, the first one by: ",
        refusal_);
    const Nearest& nearest = nearest_.bytes > 0 ? nearest_ : nearest_floor_;
    TS_CHECK_CONFIG(false, "plan: no layout of ", options_.world_size,
                    " ranks fits: the fullest rank would hold ",
                    bytes_text(nearest.bytes), " at least (", nearest.mesh,
                    "), and device.memory_gib is ", cluster_.device.memory_gib,
                    ". Use more devices (--world), a smaller batch.global or "
                    "data.seq_len, or a device with more memory.");
  }

  const RunConfig& base_;
  const Cluster& cluster_;
  const SearchOptions& options_;
  const IsSet& is_set_;
  const TokenFlops flops_;
  // Of recomputation, in the order in which they are tried.
  const std::vector<std::string> modes_;
  Search found_;
  // Of layouts that were not laid out with a mode: the least bound.
  std::map<std::string, double> least_of_modes_;
  int64_t laid_out_ = 0;
  std::optional<MemoryFloor> floor_;  // none: no layout can be run
  std::string refusal_;               // the first
  // Of what does not fit: what needs least, and on which mesh.
  struct Nearest {
    int64_t bytes = 0;
    std::string mesh;

    void lower(int64_t to, const std::string& on) {
      if (bytes == 0 || to < bytes) *this = {to, on};
    }
  };
  Nearest nearest_, nearest_floor_;  // that was laid out, by its floor
};

// Numbers by their size, words behind them.
bool is_before(const std::string& one, const std::string& other) {
  const auto key = [](const std::string& value) {
    const bool is_number = !value.empty() && value[0] >= '0' && value[0] <= '9';
    return std::tuple(!is_number, is_number ? std::stoll(value) : 0, value);
  };
  return key(one) < key(other);
}

// Of the best layout: "1.08", "at least 1.21", "0.97 to 1.08".
std::string time_text(const Outcome& outcome, double best) {
  const std::string least = fixed(outcome.bound_s / best, 2);
  const std::string most = fixed(outcome.best_s / best, 2);
  if (outcome.best_s == 0) return "at least " + least;
  const bool is_open = outcome.bound_s > 0 && outcome.bound_s < outcome.best_s;
  return is_open && least != most ? least + " to " + most : most;
}

// "With 2: 1.08, 4: 0.97 to 1.08, 8: at least 1.21 times as long. Too large: 1
// (96 GiB)".
std::string others_text(const std::map<std::string, Outcome>& outcomes,
                        const std::string& own, double best) {
  std::vector<std::string> values;
  for (const auto& [value, outcome] : outcomes) {
    if (value != own) values.push_back(value);
  }
  std::ranges::sort(values, is_before);
  std::vector<std::string> times, too_large, text;
  for (const auto& value : values) {
    const Outcome& outcome = outcomes.at(value);
    if (outcome.best_s > 0 || outcome.bound_s > 0) {
      times.push_back(value + ": " + time_text(outcome, best));
    } else {
      too_large.push_back(
          outcome.least_bytes > 0
              ? c10::str(value, " (", bytes_text(outcome.least_bytes), ")")
              : value);
    }
  }
  if (!times.empty()) {
    text.push_back("With " + c10::Join(", ", times) + " times as long");
  }
  if (!too_large.empty()) {
    text.push_back("Too large: " + c10::Join(", ", too_large));
  }
  return c10::Join(". ", text);
}

}  // namespace

Search search(const RunConfig& base, const Cluster& cluster,
              const SearchOptions& options, const IsSet& is_set) {
  cluster.check_world(options.world_size,
                      c10::str("--world ", options.world_size, " is"));
  return Searching(base, cluster, options, is_set).run();
}

std::vector<std::string> reasons_of(const Search& search,
                                    const Cluster& cluster) {
  const Plan& best = search.plans.front();
  std::vector<std::string> reasons;
  const auto& mesh = best.config.mesh;
  const auto& link = cluster.link_along(
      mesh::Axis::kTp, mesh_of(best.config, implied_world_size(best.config)));
  if (mesh.tp > 1 && &link == &cluster.in_node) {
    reasons.push_back(
        c10::str("mesh.tp ", mesh.tp, " lies in a node, which has ",
                 cluster.devices_per_node,
                 " devices: every layer waits for what it moves"));
  }
  for (const auto& [key, own] : values_of(best.config)) {
    const auto found = search.outcomes.find(key);
    if (found == search.outcomes.end() || found->second.size() < 2) continue;
    reasons.push_back(c10::str(key, " ", own, ". ",
                               others_text(found->second, own, best.step_s)));
  }
  return reasons;
}

std::vector<Change> changes_of(const Plan& plan, const Cluster& cluster) {
  std::vector<Change> changes;
  std::vector<engine::PlanCosts> costs;
  const auto mesh = mesh_of(plan.config, implied_world_size(plan.config));
  const auto add = [&](const char* what, const auto& change) {
    Cluster other = cluster;
    change(other);
    costs.push_back(other.costs(mesh));
    changes.push_back({what});
  };
  add("device.tflops twice as high", [](Cluster& c) { c.device.tflops *= 2; });
  if (cluster.device.memory_gb_per_s > 0) {
    add("device.memory_gb_per_s twice as high",
        [](Cluster& c) { c.device.memory_gb_per_s *= 2; });
  }
  if (cluster.devices_per_node > 1) {
    add("in_node.gb_per_s twice as high",
        [](Cluster& c) { c.in_node.gb_per_s *= 2; });
  }
  if (cluster.nodes > 1) {
    add("between_nodes.gb_per_s twice as high",
        [](Cluster& c) { c.between_nodes.gb_per_s *= 2; });
  }
  add("latencies half as long", [](Cluster& c) {
    c.in_node.latency_us /= 2;
    c.between_nodes.latency_us /= 2;
  });
  const auto steps =
      engine::plan_steps(plan.config, costs, engine::memory_plans(plan.config));
  for (size_t i = 0; i < steps.size(); ++i) {
    changes[i].step = steps[i].step / plan.step_s;
  }
  std::ranges::stable_sort(changes, {}, &Change::step);
  return changes;
}

}  // namespace tessera::planner
