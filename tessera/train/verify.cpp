#include "tessera/train/verify.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/random.h"
#include "tessera/optim/schedule.h"
#include "tessera/shard/slice.h"
#include "tessera/train/rank_model.h"

namespace tessera::train {
namespace {

constexpr double kBound = 1e-10;

// What one rank computed: the control.
struct Control {
  std::vector<double> losses, norms, aux_losses;
  // By name: the gradient of each step; weights and the optimizer's tensors at
  // the end, these as "exp_avg.NAME".
  std::map<std::string, std::vector<at::Tensor>> gradients;
  std::map<std::string, at::Tensor> weights, optimizer;
};

data::Batch random_batch(const RunConfig& config, int64_t step, int64_t first,
                         int64_t count) {
  const random::Stream stream(static_cast<uint64_t>(config.run.seed),
                              "verify/" + std::to_string(step));
  const int64_t length = config.data.seq_len + 1;
  const at::Tensor ids = at::empty({count, length}, at::kLong);
  auto* id = ids.mutable_data_ptr<int64_t>();
  const auto begin = static_cast<uint64_t>(first * length);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    id[i] = static_cast<int64_t>(
        stream.below(begin + static_cast<uint64_t>(i),
                     static_cast<uint64_t>(config.model.vocab)));
  }
  return {ids.narrow(1, 0, length - 1), ids.narrow(1, 1, length - 1)};
}

// How far `mesh` is from `control`, which is part of a tensor of that norm. Of
// what is zero but for rounding, `floor` counts as its norm.
struct Distance {
  double relative = 0;
  double factor = 0;  // 0: no multiple
};
Distance distance(const at::Tensor& mesh, const at::Tensor& control,
                  double norm, double floor) {
  if (mesh.numel() == 0) return {};
  const at::Tensor a = mesh.reshape({-1}), b = control.reshape({-1});
  Distance found;
  found.relative =
      (a - b).norm().item<double>() / std::max(std::max(norm, floor), 1e-300);
  if (!std::isfinite(found.relative)) found.relative = INFINITY;
  const double square = b.dot(b).item<double>();
  if (square <= floor * floor) return found;
  const double factor = a.dot(b).item<double>() / square;
  const double rest = (a - factor * b).norm().item<double>();
  if (rest < 1e-6 * std::sqrt(square)) found.factor = factor;
  return found;
}

class Comparison {
 public:
  Comparison(const RunConfig& config, int64_t steps, Control& control,
             bool records)
      : config_(config), steps_(steps), control_(control), records_(records) {
    result_.steps = steps;
    result_.bound = kBound;
  }

  Verification run(int64_t world_size) {
    comm::run_threads(
        world_size, "shm", [&](comm::Communicator& ranks) { run_rank(ranks); },
        std::chrono::minutes(5));
    keep_the_first();
    return std::move(result_);
  }

 private:
  void run_rank(comm::Communicator& ranks) {
    RankModel model(config_, ranks);
    for (int64_t step = 1; step <= steps_; ++step) {
      const double lr = optim::lr_at({step - 1, config_.run.steps},
                                     config_.optimizer.lr, config_.schedule);
      const StepInput input =
          step_input(config_, lr, [&](int64_t first, int64_t count) {
            return random_batch(config_, step, first, count);
          });
      model.step(input, [&](const program::Instruction& done, double) {
        if (done.op == program::Op::kAwaitGradients) {
          take_gradients(model, step);
        }
      });
      take_loss(model, ranks.world(), step);
    }
    take_state(model);
  }

  void take_loss(RankModel& model, comm::Group& world, int64_t step) {
    at::Tensor sums =
        at::tensor({model.stage().loss_sum(), model.stage().weight(),
                    model.stage().aux_sum()},
                   at::kDouble);
    world.all_reduce(sums).wait();
    const double loss = sums[0].item<double>() / sums[1].item<double>();
    const double norm = model.stage().grad_norm();
    const double aux = sums[2].item<double>();
    if (world.rank() != 0) return;
    if (records_) {
      control_.losses.push_back(loss);
      control_.norms.push_back(norm);
      control_.aux_losses.push_back(aux);
      return;
    }
    if (aux != 0) {
      compare_number("aux_loss", aux, control_.aux_losses.at(step - 1), step,
                     result_.loss);
    }
    compare_number("loss", loss, control_.losses.at(step - 1), step,
                   result_.loss);
    compare_number("grad_norm", norm, control_.norms.at(step - 1), step,
                   result_.grad_norm);
  }

  void compare_number(const char* what, double mesh, double control,
                      int64_t step, double& largest) {
    const double relative = std::abs(mesh - control) / std::abs(control);
    largest = std::max(largest, relative);
    if (relative <= kBound) return;
    note({.parameter = "",
          .what = what,
          .step = step,
          .place = "",
          .relative = relative,
          .factor = mesh / control,
          .axes = {}});
  }

  void take_gradients(RankModel& model, int64_t step) {
    const auto& composed = model.composed();
    for (const auto& parameter : composed.parameters->parameters()) {
      if (records_) {
        control_.gradients[parameter.name].push_back(
            parameter.gradient.clone());
        continue;
      }
      const at::Tensor& whole =
          control_.gradients.at(parameter.name).at(step - 1);
      compare("gradient", parameter.name, parameter.layout, parameter.gradient,
              whole, 1e-6 * control_norm(step), step, model, result_.gradients);
    }
  }

  // Of all gradients of a step of the control.
  double control_norm(int64_t step) const {
    double square = 0;
    for (const auto& [name, steps] : control_.gradients) {
      square += std::pow(steps.at(step - 1).norm().item<double>(), 2);
    }
    return std::sqrt(square);
  }

  void take_state(RankModel& model) {
    std::map<std::string, const mesh::Layout*> layouts;
    for (const auto& parameter : model.composed().parameters->parameters()) {
      layouts[parameter.name] = &parameter.layout;
      if (records_) {
        control_.weights[parameter.name] = parameter.shard.clone();
        continue;
      }
      const at::Tensor& whole = control_.weights.at(parameter.name);
      const double update =
          config_.optimizer.lr * std::sqrt(static_cast<double>(whole.numel()));
      compare("weight", parameter.name, parameter.layout, parameter.shard,
              whole, update, steps_, model, result_.weights);
    }
    const double norm = control_norm(steps_);
    for (const auto& item : model.optimizer().state()) {
      if (item.parameter.empty()) continue;
      if (records_) {
        control_.optimizer[item.name] = item.tensor.clone();
        continue;
      }
      const std::string what = item.name.substr(0, item.name.find('.'));
      const double scale = what == "exp_avg_sq" ? norm * norm : norm;
      compare(what, item.parameter, *layouts.at(item.parameter), item.tensor,
              control_.optimizer.at(item.name), 1e-6 * scale, steps_, model,
              result_.optimizer);
    }
  }

  void compare(const std::string& what, const std::string& name,
               const mesh::Layout& layout, const at::Tensor& mine,
               const at::Tensor& whole, double floor, int64_t step,
               const RankModel& model, double& largest) {
    const auto& mesh = model.mesh();
    const auto& coord = model.composed().coord;
    const at::Tensor control =
        shard::slice(whole, layout.local_box(mesh, coord));
    const Distance found =
        distance(mine, control, whole.norm().item<double>(), floor);
    const std::scoped_lock lock(mutex_);
    largest = std::max(largest, found.relative);
    if (found.relative <= kBound) return;
    note_locked({.parameter = name,
                 .what = what,
                 .step = step,
                 .place = mesh.describe(mesh.rank_at(coord)),
                 .relative = found.relative,
                 .factor = found.factor,
                 .axes = {}});
  }

  void note(Difference difference) {
    const std::scoped_lock lock(mutex_);
    note_locked(std::move(difference));
  }

  // Of each tensor the rank that is furthest off, at the first step.
  void note_locked(Difference difference) {
    for (auto& known : result_.differences) {
      if (known.parameter != difference.parameter ||
          known.what != difference.what) {
        continue;
      }
      if (difference.step == known.step &&
          difference.relative > known.relative) {
        known = std::move(difference);
      }
      return;
    }
    result_.differences.push_back(std::move(difference));
  }

  // What differs later follows from what differs first: of the first step, and
  // of that the losses and gradients before what was made from them.
  void keep_the_first() {
    auto& all = result_.differences;
    if (all.empty()) return;
    const auto order = [](const Difference& each) {
      const bool is_cause = each.what == "gradient" || each.what == "loss" ||
                            each.what == "aux_loss";
      return std::pair(each.step, is_cause ? 0 : 1);
    };
    const auto first = order(*std::ranges::min_element(all, {}, order));
    std::erase_if(all, [&](const auto& each) { return order(each) != first; });
    std::ranges::sort(all, std::ranges::greater{}, &Difference::relative);
  }

  const RunConfig& config_;
  const int64_t steps_;
  Control& control_;
  const bool records_;
  Verification result_;
  std::mutex mutex_;
};

RunConfig on_one_rank(RunConfig config) {
  const auto order = config.mesh.order;
  config.mesh = {};
  config.mesh.dp = config.mesh.dp_replicate = config.mesh.dp_shard = 1;
  config.mesh.order = order;
  config.zero = {};
  config.tensor = {};
  config.pipeline = {};
  config.recompute = {};
  return config;
}

struct AxisDegree {
  std::string name;
  int64_t mesh::MeshConfig::* degree;
};
const std::vector<AxisDegree>& axes_of_mesh() {
  static const std::vector<AxisDegree> axes = {
      {"pp", &mesh::MeshConfig::pp},
      {"dp_replicate", &mesh::MeshConfig::dp_replicate},
      {"dp_shard", &mesh::MeshConfig::dp_shard},
      {"cp", &mesh::MeshConfig::cp},
      {"tp", &mesh::MeshConfig::tp},
      {"ep", &mesh::MeshConfig::ep},
      {"etp", &mesh::MeshConfig::etp}};
  return axes;
}

int64_t world_of(const mesh::MeshConfig& mesh) {
  return mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp;
}

// Names the axes without which a difference goes away.
void blame(const RunConfig& config, int64_t steps, Control& control,
           std::vector<Difference>& differences) {
  for (const auto& axis : axes_of_mesh()) {
    if (config.mesh.*axis.degree == 1) continue;
    RunConfig without = config;
    without.mesh.*axis.degree = 1;
    without.mesh.dp = 0;
    if (axis.name == "pp") without.pipeline = {};
    if (axis.name == "tp") {
      without.tensor = {};
      without.mesh.etp = 1;
    }
    // What is left of the ranks that ep folds.
    without.mesh.ep =
        std::gcd(without.mesh.ep,
                 world_of(without.mesh) / without.mesh.pp / without.mesh.etp);
    std::set<std::pair<std::string, std::string>> left;
    const auto again = Comparison(without, steps, control, /*records=*/false)
                           .run(world_of(without.mesh));
    for (const auto& each : again.differences) {
      left.emplace(each.parameter, each.what);
    }
    for (auto& each : differences) {
      if (!left.contains({each.parameter, each.what})) {
        each.axes.push_back(axis.name);
      }
    }
  }
}

// The smallest size of at least `at_least` that leaves the same rest by
// `modulus`.
int64_t shrink(int64_t size, int64_t modulus, int64_t at_least) {
  if (size <= at_least) return size;
  const int64_t rest = size % modulus;
  int64_t smaller = at_least - at_least % modulus + rest;
  if (smaller < at_least) smaller += modulus;
  return std::min(size, smaller);
}

}  // namespace

std::string Difference::describe() const {
  std::string axis;
  for (const auto& name : axes) axis += (axis.empty() ? "" : " or ") + name;
  if (axis.empty()) axis = "no single axis";
  std::string text = (parameter.empty() ? "" : parameter + ": ") + what + " ";
  char number[64];
  const double inverse = factor != 0 ? 1 / factor : 0;
  if (factor > 1 + 1e-6) {
    std::snprintf(number, sizeof(number), "%.3f times too large", factor);
    text += number;
    text += std::abs(factor - 2) < 1e-6
                ? ": summed twice over " + axis + "?"
                : ": summed too often, or not divided, over " + axis + "?";
  } else if (factor > 0 && inverse > 1 + 1e-6) {
    std::snprintf(number, sizeof(number), "%.3f times too small", inverse);
    text += number;
    text += ": divided, or not summed, over " + axis + "?";
  } else if (factor < 0) {
    std::snprintf(number, sizeof(number), "%.3f times what it should be",
                  factor);
    text += number;
    text += ": " + axis + "?";
  } else {
    std::snprintf(number, sizeof(number), "off by %.2e of its norm", relative);
    text += number;
    text += ": a part is missing, or another's, over " + axis + "?";
  }
  if (!place.empty()) text += " (at " + place + ")";
  return text + " [step " + std::to_string(step) + "]";
}

Verification verify(const RunConfig& config, int64_t world_size,
                    int64_t steps) {
  RunConfig wide = config;
  wide.precision.compute = "fp64";
  const RunConfig one = on_one_rank(wide);
  Control control;
  Comparison(one, steps, control, /*records=*/true).run(1);
  Verification result =
      Comparison(wide, steps, control, /*records=*/false).run(world_size);
  if (!result.equal()) blame(wide, steps, control, result.differences);
  return result;
}

RunConfig shrunk(RunConfig config, int64_t world_size) {
  const auto& mesh = config.mesh;
  auto& model = config.model;
  const int64_t runs = mesh.pp * config.pipeline.chunks;
  const int64_t shards = mesh.tp * mesh.dp_shard;
  if (config.pipeline.split.empty()) {
    model.layers = shrink(model.layers, runs, 2 * runs);
  }
  model.head_dim = std::min<int64_t>(model.head_dim, 4);
  // GPT-2's heads fill the width.
  model.hidden = model.family == "gpt2" ? model.heads * model.head_dim
                                        : shrink(model.hidden, shards, 8);
  model.ffn = shrink(model.ffn, shards, 2 * mesh.tp);
  model.vocab = shrink(model.vocab, shards, 16);
  const int64_t pieces = 2 * mesh.cp * mesh.tp;
  config.data.seq_len =
      std::min(config.data.seq_len, (16 + pieces - 1) / pieces * pieces);
  model.max_seq =
      std::max(config.data.seq_len, std::min<int64_t>(model.max_seq, 64));
  const int64_t share = config.batch.micro * data_parallel_degree(config);
  const int64_t count = config.batch.global / share;
  config.batch.micro = std::min<int64_t>(config.batch.micro, 2);
  const int64_t fewer = shrink(count, mesh.pp, 2 * mesh.pp);
  config.batch.global =
      config.batch.micro * data_parallel_degree(config) * fewer;
  complete(config, world_size);
  return config;
}

}  // namespace tessera::train
