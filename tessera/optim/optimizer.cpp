#include "tessera/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <set>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/sgd.h"

namespace tessera::optim {
namespace {

bool is_low_precision(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

void require_usable(const FlatSegment& segment, std::set<std::string>& names) {
  TS_CHECK(names.insert(segment.name).second, "optim: parameter '",
           segment.name, "' is given twice. Give a tied parameter once.");
  TS_CHECK(segment.parameter.defined() && segment.parameter.is_contiguous(),
           "optim: parameter '", segment.name,
           "' is not contiguous. Give parameter.contiguous().");
  const at::ScalarType type = segment.parameter.scalar_type();
  TS_CHECK(type == at::kFloat || type == at::kDouble || is_low_precision(type),
           "optim: parameter '", segment.name, "' has type ", type,
           "; fp64, fp32, bf16 and fp16 can be optimized.");
}

}  // namespace

std::vector<at::Tensor> Optimizer::Group::part_of(
    const std::vector<at::Tensor>& all) const {
  std::vector<at::Tensor> part;
  for (const size_t i : segments) part.push_back(all[i]);
  return part;
}

Optimizer::Optimizer(std::vector<FlatSegment> segments)
    : segments_(std::move(segments)),
      steps_(at::zeros({}, at::TensorOptions(at::kLong))) {
  const at::NoGradGuard no_grad;
  std::set<std::string> names;
  for (const FlatSegment& segment : segments_) require_usable(segment, names);
  state_.push_back({"step", "", steps_});
  add_masters();
  groups_[1].decay = true;
  for (size_t i = 0; i < segments_.size(); ++i) {
    groups_[segments_[i].decay ? 1 : 0].segments.push_back(i);
  }
  for (Group& group : groups_) group.parameters = group.part_of(masters_);
}

void Optimizer::add_masters() {
  for (const FlatSegment& segment : segments_) {
    at::Tensor master = segment.parameter.detach();
    if (is_low_precision(master.scalar_type())) {
      master = master.to(at::kFloat);
      state_.push_back({"master." + segment.name, segment.name, master});
    }
    masters_.push_back(master);
    const at::Tensor& first = masters_.front();
    TS_CHECK(master.scalar_type() == first.scalar_type() &&
                 master.device() == first.device(),
             "optim: parameter '", segment.name, "' is ", master.scalar_type(),
             " on ", master.device(), " and '", segments_.front().name, "' is ",
             first.scalar_type(), " on ", first.device(),
             ". Make one optimizer for each type and device.");
  }
}

int64_t Optimizer::steps() const { return steps_.item<int64_t>(); }

std::vector<at::Tensor> Optimizer::add_state(const std::string& prefix) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < segments_.size(); ++i) {
    tensors.push_back(at::zeros_like(masters_[i]));
    state_.push_back(
        {prefix + "." + segments_[i].name, segments_[i].name, tensors.back()});
  }
  return tensors;
}

at::Tensor Optimizer::gradient_of(size_t i) const {
  const FlatSegment& segment = segments_[i];
  const at::Tensor gradient =
      segment.gradient.defined() ? segment.gradient : segment.parameter.grad();
  TS_CHECK(gradient.defined(), "optim: parameter '", segment.name,
           "' has no gradient. Run backward first, leave a frozen parameter "
           "out, or set its gradient to zeros.");
  TS_CHECK(gradient.sizes() == segment.parameter.sizes(), "optim: parameter '",
           segment.name, "' has shape ", segment.parameter.sizes(),
           " and its gradient ", gradient.sizes(), ".");
  return gradient.detach().to(masters_[i].options()).contiguous();
}

void Optimizer::step(double lr) {
  const at::NoGradGuard no_grad;
  for (Group& group : groups_) {
    group.gradients.clear();
    for (const size_t i : group.segments) {
      group.gradients.push_back(gradient_of(i));
    }
  }
  steps_.add_(1);
  for (Group& group : groups_) {
    if (!group.segments.empty()) update(group, lr);
    group.gradients.clear();
  }
  for (size_t i = 0; i < segments_.size(); ++i) {
    at::Tensor parameter = segments_[i].parameter.detach();
    if (is_low_precision(parameter.scalar_type())) {
      parameter.copy_(masters_[i]);
    }
  }
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          std::vector<FlatSegment> segments) {
  if (config.type == "sgd") {
    return std::make_unique<Sgd>(
        std::move(segments), SgdOptions{config.momentum, config.weight_decay});
  }
  TS_CHECK_CONFIG(config.type == "adamw", "optimizer.type '", config.type,
                  "' is not built. Use adamw or sgd.");
  return std::make_unique<AdamW>(
      std::move(segments), AdamWOptions{config.betas.at(0), config.betas.at(1),
                                        config.eps, config.weight_decay});
}

}  // namespace tessera::optim
