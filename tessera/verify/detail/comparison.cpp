#include "tessera/verify/detail/comparison.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/random.h"
#include "tessera/engine/rank_model.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/run_devices.h"
#include "tessera/mesh/slice.h"
#include "tessera/optim/registry.h"
#include "tessera/optim/schedule.h"
#include "tessera/verify/detail/host_reads.h"
#include "tessera/verify/detail/late_communicator.h"
#include "tessera/verify/random_batch.h"

namespace tessera::verify::detail {

using engine::RankModel;
using engine::RunConfig;

namespace {

// Of relative differences, in losses and norms, and in tensors. What is below
// `negligible` of the whole gradient is compared with that: it may be rounding
// alone (a softmax does not see the bias of k).
struct Bounds {
  double number, tensor, negligible;
};
constexpr Bounds kFp64{1e-10, 1e-10, 1e-6};
constexpr Bounds kFp32{1e-5, 1e-4, 1e-3};

constexpr double kNudge = 0.25;

// Of a step: one, and of every layer of experts that goes forward the sizes of
// its products. Where attention's core alone is computed again, none does then.
int64_t reads_needed(const program::Program& step, const RunConfig& config) {
  const models::ModelConfig& model = config.model;
  const bool whole = config.recompute.mode != "selective";
  return 1 + std::ranges::count_if(step, [&](const auto& each) {
           const bool forward = each.op == program::Op::kForward ||
                                (whole && program::is_again(each.op));
           const int64_t layer = each.unit - 1;  // the first unit embeds
           return forward && layer >= 0 && layer < model.num_blocks() &&
                  model.has_experts(layer);
         });
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
  // Without a control it records one.
  Comparison(const RunConfig& config, const Probe& probe,
             const Control* control)
      : config_(config),
        probe_(probe),
        steps_(probe.steps),
        bounds_(config.precision.compute == "fp64" ? kFp64 : kFp32),
        control_(control ? *control : recorded_),
        records_(control == nullptr) {
    result_.steps = steps_;
  }

  Verification run(int64_t world_size) {
    comm::run_threads({.backend = "shm",
                       .world_size = world_size,
                       .local_world_size = world_size,
                       .devices = engine::devices_of_ranks(config_, world_size),
                       .timeout = std::chrono::minutes(5)},
                      [&](comm::Communicator& ranks) { run_rank(ranks); });
    keep_the_first();
    return std::move(result_);
  }

  Control run_one_rank() {
    run(1);
    return std::move(recorded_);
  }

 private:
  void run_rank(comm::Communicator& in_time) {
    LateCommunicator ranks(in_time);
    RankModel model(config_, ranks, program::Purpose::kTraining,
                    records_ ? program::passes::Choice() : probe_.passes);
    nudge(model);
    for (int64_t step = 1; step <= steps_; ++step) {
      // Behind the third the pipeline is emptied, as behind every fourth more.
      std::optional<engine::StepInput> next;
      const bool flushes = step == steps_ || step % 4 == 3;
      if (model.goes_on() && !flushes) next = input_of(step + 1, ranks.rank());
      const HostReads reads;
      model.step(
          input_of(step, ranks.rank()),
          [&](const program::Instruction& done, double, double) {
            if (done.op != program::Op::kNorm) return;
            const at::DisableRecordFunctionGuard not_of_the_step;
            take_parameters(model, step);
            take_gradients(model, step);
          },
          std::move(next));
      if (config_.run.is_on_cpu()) expect_needed(reads.count(), model);
      take_loss(model, ranks.world(), step);
    }
    take_state(model);
    ranks.expect_all_awaited();
  }

  engine::StepInput input_of(int64_t step, int64_t rank) const {
    const double lr = optim::lr_at({step - 1, config_.run.steps},
                                   config_.optimizer.lr, config_.schedule);
    return step_input(
        config_, step, lr,
        [this, rank](int64_t of, int64_t first, int64_t count) {
          TS_CHECK(engine::reader_of(config_, rank) == rank,
                   "verify: a rank reads what another one is to read for it");
          return random_batch(config_, of, first, count);
        });
  }

  void expect_needed(int64_t reads, const RankModel& model) const {
    const int64_t needed = reads_needed(model.program(), config_);
    TS_CHECK(reads == needed, "verify: the host reads ", reads,
             " times in a step, where ", needed, " are needed");
  }

  void nudge(RankModel& model) const {
    if (probe_.nudged.empty()) return;
    const at::NoGradGuard no_grad;
    for (const auto& parameter : model.composed().parameters->parameters()) {
      if (kind_of(parameter.name) != probe_.nudged) continue;
      const auto& layout = parameter.layout;
      const at::Tensor noise =
          at::empty(layout.global_shape(), at::TensorOptions(at::kDouble));
      random::Stream(static_cast<uint64_t>(config_.run.seed), parameter.name)
          .fill_normal(noise.mutable_data_ptr<double>(), 0,
                       static_cast<uint64_t>(noise.numel()), 0.0, kNudge);
      at::Tensor shard = parameter.shard;
      shard.add_(mesh::slice(noise, layout.local_box(model.mesh(),
                                                     model.composed().coord))
                     .to(shard.device()));
    }
  }

  // As the layers saw them; in stage 3 they are gone again.
  void take_parameters(RankModel& model, int64_t step) {
    for (const auto& parameter : nn::parameters_of(model.decoder())) {
      const auto& layout = parameter.spec->layout;
      const at::Tensor& seen = parameter.tensor;
      if (!layout.held_by(model.composed().coord)) continue;
      if (seen.storage().nbytes() < seen.nbytes()) continue;
      if (moves_by_chance(parameter.name)) continue;
      if (records_) {
        recorded_.before[parameter.name].push_back(seen.detach().clone());
        continue;
      }
      const at::Tensor& whole = control_.before.at(parameter.name).at(step - 1);
      compare("parameter", parameter.name,
              layout.with(layout.data_axis(), mesh::Placement::replicate()),
              seen.detach(), whole, update_norm(whole), step, model,
              result_.weights);
    }
  }

  // Its gradient is rounding alone, and the optimizer makes whole steps of it
  // nevertheless.
  bool moves_by_chance(const std::string& parameter) const {
    if (records_ || !optim::update_rule(config_.optimizer.type).by_sign) {
      return false;
    }
    const auto found = control_.gradients.find(parameter);
    if (found == control_.gradients.end()) return false;  // it is frozen
    const auto& gradients = found->second;
    for (int64_t step = 1; step <= steps_; ++step) {
      const double norm = gradients.at(step - 1).norm().item<double>();
      if (norm > bounds_.negligible * control_norm(step)) return false;
    }
    return true;
  }

  // Of an optimizer's step, about.
  double update_norm(const at::Tensor& whole) const {
    return config_.optimizer.lr * std::sqrt(static_cast<double>(whole.numel()));
  }

  void take_loss(RankModel& model, comm::Group& world, int64_t step) {
    at::Tensor sums =
        at::tensor({model.actor().loss_sum(), model.actor().weight(),
                    model.actor().aux_sum(), model.actor().ahead_loss()},
                   at::kDouble);
    world.all_reduce(sums).synchronize();
    const double loss = sums[0].item<double>() / sums[1].item<double>();
    const double norm = model.actor().grad_norm();
    const double aux = sums[2].item<double>();
    const double ahead =
        sums[3].item<double>() /
        static_cast<double>(model.mesh().degree(mesh::Axis::kTp));
    if (world.rank() != 0) return;
    if (records_) {
      recorded_.losses.push_back(loss);
      recorded_.norms.push_back(norm);
      recorded_.aux_losses.push_back(aux);
      recorded_.mtp_losses.push_back(ahead);
      return;
    }
    if (config_.model.layers_with_experts() > 0) {
      compare_number("aux_loss", aux, control_.aux_losses.at(step - 1), step,
                     result_.loss);
    }
    if (config_.model.mtp.layers > 0) {
      compare_number("mtp_loss", ahead, control_.mtp_losses.at(step - 1), step,
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
    if (relative <= bounds_.number) return;
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
    for (const auto& parameter : composed.parameters->trained()) {
      if (records_) {
        recorded_.gradients[parameter.name].push_back(
            parameter.gradient.clone());
        continue;
      }
      const at::Tensor& whole =
          control_.gradients.at(parameter.name).at(step - 1);
      compare("gradient", parameter.name, parameter.layout, parameter.gradient,
              whole, bounds_.negligible * control_norm(step), step, model,
              result_.gradients);
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

  // The weights that the next step would be taken at.
  void take_delayed(RankModel& model, size_t i) {
    const auto& composed = model.composed();
    if (composed.units.versions.parameters == 1) return;
    const auto& parameter = composed.parameters->parameters()[i];
    const at::Tensor delayed = composed.parameters->shard_of_step(i);
    const std::string name = "delayed " + parameter.name;
    if (records_) {
      recorded_.weights[name] = delayed.clone();
    } else if (!moves_by_chance(parameter.name)) {
      const at::Tensor& whole = control_.weights.at(name);
      compare("delayed weight", parameter.name, parameter.layout, delayed,
              whole, update_norm(whole), steps_, model, result_.weights);
    }
  }

  void take_state(RankModel& model) {
    std::map<std::string, const mesh::Layout*> layouts;
    const auto& parameters = model.composed().parameters->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& parameter = parameters[i];
      layouts[parameter.name] = &parameter.layout;
      take_delayed(model, i);
      if (records_) {
        recorded_.weights[parameter.name] = parameter.shard.clone();
        continue;
      }
      if (moves_by_chance(parameter.name)) continue;
      const at::Tensor& whole = control_.weights.at(parameter.name);
      compare("weight", parameter.name, parameter.layout, parameter.shard,
              whole, update_norm(whole), steps_, model, result_.weights);
    }
    const double norm = control_norm(steps_);
    for (const auto& item : model.optimizer().state()) {
      if (item.parameter.empty()) continue;
      if (records_) {
        recorded_.optimizer[item.name] = item.tensor.clone();
        continue;
      }
      const bool is_weight = item.gradient_power == 0;
      if (is_weight && moves_by_chance(item.parameter)) continue;
      const std::string what = item.name.substr(0, item.name.find('.'));
      const at::Tensor& whole = control_.optimizer.at(item.name);
      compare(
          what, item.parameter, *layouts.at(item.parameter), item.tensor, whole,
          is_weight ? update_norm(whole)
                    : bounds_.negligible * std::pow(norm, item.gradient_power),
          steps_, model, result_.optimizer);
    }
  }

  void compare(const std::string& what, const std::string& name,
               const mesh::Layout& layout, const at::Tensor& mine,
               const at::Tensor& whole, double floor, int64_t step,
               const RankModel& model, double& largest) {
    const auto& mesh = model.mesh();
    const auto& coord = model.composed().coord;
    const at::Tensor control =
        mesh::slice(whole, layout.local_box(mesh, coord));
    const Distance found = distance(mine.to(at::kCPU), control,
                                    whole.norm().item<double>(), floor);
    const std::scoped_lock lock(mutex_);
    largest = std::max(largest, found.relative);
    if (found.relative <= bounds_.tensor) return;
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
  // of that the parameters before losses and gradients, and these before what
  // was made from them.
  void keep_the_first() {
    auto& all = result_.differences;
    if (all.empty()) return;
    const auto order = [](const Difference& each) {
      const bool follows = each.what == "gradient" || each.what == "loss" ||
                           each.what == "aux_loss" || each.what == "mtp_loss";
      return std::pair(each.step, each.what == "parameter" ? 0
                                  : follows                ? 1
                                                           : 2);
    };
    const auto first = order(*std::ranges::min_element(all, {}, order));
    std::erase_if(all, [&](const auto& each) { return order(each) != first; });
    std::ranges::sort(all, std::ranges::greater{}, &Difference::relative);
  }

  const RunConfig& config_;
  const Probe& probe_;
  const int64_t steps_;
  const Bounds bounds_;
  const Control& control_;
  const bool records_;
  Control recorded_;
  Verification result_;
  std::mutex mutex_;
};

}  // namespace

std::string kind_of(const std::string& parameter) {
  std::string kind;
  bool in_number = false;
  for (size_t i = 0; i < parameter.size(); ++i) {
    const bool starts = i > 0 && parameter[i - 1] == '.';
    const bool is_digit = parameter[i] >= '0' && parameter[i] <= '9';
    in_number = is_digit && (starts || in_number);
    if (!in_number) kind += parameter[i];
    if (in_number && starts) kind += '*';
  }
  return kind;
}

Control record(const RunConfig& config, const Probe& probe) {
  return Comparison(config, probe, nullptr).run_one_rank();
}

Verification compare(const RunConfig& config, int64_t world_size,
                     const Control& control, const Probe& probe) {
  return Comparison(config, probe, &control).run(world_size);
}

}  // namespace tessera::verify::detail
