// AdamW over a model's parameters, with clipping and, of bf16, the copy.
#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <map>
#include <memory>

#include "tessera/benchmark/kernels/contest.h"
#include "tessera/optim/optimizer.h"

namespace tessera::benchmark::kernels {
namespace {

using Shapes = std::vector<std::vector<int64_t>>;

// Small enough that a gradient is not clipped away while it is timed.
constexpr double kScale = 0.9999;
constexpr double kLr = 1e-4, kDecay = 0.1;
constexpr std::array<double, 2> kBetas = {0.9, 0.95};

// A decoder of 34 million parameters: eight layers, the embedding, the head.
Shapes model_shapes() {
  Shapes shapes(2, {8192, 512});
  for (int layer = 0; layer < 8; ++layer) {
    for (int each = 0; each < 4; ++each) shapes.push_back({512, 512});
    for (int each = 0; each < 3; ++each) shapes.push_back({1408, 512});
  }
  return shapes;
}

class Update {
 public:
  Update(const Shapes& shapes, at::ScalarType dtype) {
    std::vector<optim::FlatSegment> segments;
    for (const auto& shape : shapes) {
      const auto name = c10::str(segments.size());
      parameters_.push_back(random_tensor(shape, dtype, segments.size()));
      gradients_.push_back(random_tensor(shape, at::kFloat, 100));
      segments.push_back({name, parameters_.back(), gradients_.back(), true});
      numel_ += parameters_.back().numel();
    }
    const optim::OptimizerConfig config{
        .betas = {kBetas[0], kBetas[1]}, .eps = 1e-8, .weight_decay = kDecay};
    optimizer_ = optim::make_optimizer(config, std::move(segments));
    std::map<std::string, at::Tensor> state;
    for (const auto& item : optimizer_->state()) state[item.name] = item.tensor;
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto name = c10::str(i);
      const bool low = dtype != at::kFloat;
      masters_.push_back(low ? state.at("master." + name) : parameters_[i]);
      averages_.push_back(state.at("exp_avg." + name));
      squares_.push_back(state.at("exp_avg_sq." + name));
    }
  }

  void ours() {
    optimizer_->begin_step(kScale);
    optimizer_->step(kLr, 0, parameters_.size());
  }

  // A pass to clip, one to update, one to copy.
  void by_libtorch() {
    at::_foreach_mul_(gradients_, kScale);
    const std::vector<at::Tensor> step(
        masters_.size(), at::full({}, static_cast<double>(++steps_)));
    at::_fused_adamw_(masters_, gradients_, averages_, squares_, {}, step, kLr,
                      kBetas[0], kBetas[1], kDecay, 1e-8, false, false);
    if (parameters_.front().scalar_type() != at::kFloat) {
      at::_foreach_copy_(parameters_, masters_);
    }
  }

  // The parameters, of their type, and both moments of each.
  std::vector<at::Tensor> after_one_step() {
    ours();
    std::vector<at::Tensor> all = parameters_;
    all.insert(all.end(), averages_.begin(), averages_.end());
    all.insert(all.end(), squares_.begin(), squares_.end());
    return all;
  }

  // The first step's moments are zero before it, and parameters alone would
  // not tell one beta from another.
  std::vector<Reference> one_step() const {
    std::vector<Reference> all, averages, squares;
    for (size_t i = 0; i < masters_.size(); ++i) {
      const at::Tensor g = gradients_[i].to(at::kDouble) * kScale;
      const at::Tensor p = masters_[i].to(at::kDouble);
      const at::Tensor step = kLr * g / (g.abs() + 1e-8);
      all.push_back({p * (1 - kLr * kDecay) - step, p.abs() + step.abs()});
      const at::Tensor m = (1 - kBetas[0]) * g, v = (1 - kBetas[1]) * g * g;
      // Of floats that are rounded one after another.
      constexpr double kRoundings = 4;
      averages.push_back({m, kRoundings * m.abs()});
      squares.push_back({v, kRoundings * v});
    }
    all.insert(all.end(), averages.begin(), averages.end());
    all.insert(all.end(), squares.begin(), squares.end());
    return all;
  }

  int64_t numel() const { return numel_; }

 private:
  std::vector<at::Tensor> parameters_, gradients_, masters_;
  std::vector<at::Tensor> averages_, squares_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  int64_t numel_ = 0, steps_ = 0;
};

// Timed are all tensors of a model, checked a few.
Contest adamw(at::ScalarType dtype) {
  const Shapes shapes = model_shapes();
  const auto update = std::make_shared<Update>(shapes, dtype);
  // Master and two moments read and written, a gradient read; and the copy.
  const double bytes_each = 28 + (dtype == at::kFloat ? 0 : 2);
  Contest contest{
      .kernel = "adamw",
      .dtype = dtype,
      .shape = c10::str(update->numel(), " in ", shapes.size(), " tensors"),
      .bytes = bytes_each * static_cast<double>(update->numel()),
      .most_ulps = dtype == at::kFloat ? 4.0 : 1.0};
  const auto checked =
      std::make_shared<Update>(Shapes{{512, 512}, {1003, 7}, {1}}, dtype);
  const auto wanted = checked->one_step();
  contest.found = [checked] { return checked->after_one_step(); };
  contest.wanted = [wanted] { return wanted; };
  contest.ours = [update] { update->ours(); };
  contest.libtorch = [update] { update->by_libtorch(); };
  return contest;
}

}  // namespace

std::vector<MakeContest> update_contests() { return {adamw}; }

}  // namespace tessera::benchmark::kernels
