#include "tessera/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <set>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

bool is_low_precision(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

// As a cut along dim 1 leaves it.
bool is_contiguous_by_parts(const at::Tensor& tensor) {
  return tensor.is_contiguous() ||
         (tensor.size(0) > 0 && tensor.select(0, 0).is_contiguous());
}

// The tensor, or, `in_parts`, its parts along dim 0.
void append(const at::Tensor& tensor, bool in_parts,
            std::vector<at::Tensor>& to) {
  if (!in_parts) return to.push_back(tensor);
  for (auto& part : tensor.unbind(0)) to.push_back(std::move(part));
}

void require_usable(const FlatSegment& segment, std::set<std::string>& names) {
  TS_CHECK(names.insert(segment.name).second, "optim: parameter '",
           segment.name, "' is given twice. Give a tied parameter once.");
  TS_CHECK(
      segment.parameter.defined() && is_contiguous_by_parts(segment.parameter),
      "optim: parameter '", segment.name,
      "' is not contiguous, nor are its parts along dim 0. Give "
      "parameter.contiguous().");
  const at::ScalarType type = segment.parameter.scalar_type();
  TS_CHECK(type == at::kFloat || type == at::kDouble || is_low_precision(type),
           "optim: parameter '", segment.name, "' has type ", type,
           "; fp64, fp32, bf16 and fp16 can be optimized.");
}

at::Tensor gradient_as_given(const FlatSegment& segment) {
  return segment.gradient.defined() ? segment.gradient
                                    : segment.parameter.grad();
}

}  // namespace

Optimizer::Optimizer(const UpdateRule& rule, const OptimizerConfig& config,
                     std::vector<FlatSegment> segments)
    : rule_(rule),
      config_(config),
      segments_(std::move(segments)),
      steps_(at::zeros({}, at::TensorOptions(at::kLong))),
      updated_(segments_.size(), true) {
  const at::NoGradGuard no_grad;
  if (config_.betas.empty()) config_.betas = rule_.betas;
  std::set<std::string> names;
  for (const FlatSegment& segment : segments_) require_usable(segment, names);
  state_.push_back({"step", "", steps_});
  add_masters();
  add_moments();
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

int64_t Optimizer::steps() const { return *steps_.const_data_ptr<int64_t>(); }

void Optimizer::add_moments() {
  for (const Moment& moment : rule_.moments_with(config_)) {
    auto& tensors = moments_.emplace_back();
    for (size_t i = 0; i < segments_.size(); ++i) {
      const std::string& parameter = segments_[i].name;
      tensors.push_back(at::zeros_like(masters_[i]));
      state_.push_back({moment.name + "." + parameter, parameter,
                        tensors.back(), moment.gradient_power});
    }
  }
}

void Optimizer::require_gradient(size_t i) const {
  const FlatSegment& segment = segments_[i];
  const at::Tensor gradient = gradient_as_given(segment);
  TS_CHECK(gradient.defined(), "optim: parameter '", segment.name,
           "' has no gradient. Run backward first, leave a frozen parameter "
           "out, or set its gradient to zeros.");
  TS_CHECK(gradient.sizes() == segment.parameter.sizes(), "optim: parameter '",
           segment.name, "' has shape ", segment.parameter.sizes(),
           " and its gradient ", gradient.sizes(), ".");
}

// As it was reduced: the rule reads it, whatever its type.
at::Tensor Optimizer::gradient_of(size_t i, bool in_parts) const {
  const at::Tensor gradient =
      gradient_as_given(segments_[i]).detach().to(masters_[i].device());
  const bool as_it_lies = in_parts && is_contiguous_by_parts(gradient);
  return as_it_lies ? gradient : gradient.contiguous();
}

void Optimizer::append_segment(size_t i, UpdateGroup& group) const {
  const at::Tensor parameter = segments_[i].parameter.detach();
  const bool in_parts =
      !parameter.is_contiguous() || !masters_[i].is_contiguous();
  append(masters_[i], in_parts, group.parameters);
  append(gradient_of(i, in_parts), in_parts, group.gradients);
  for (size_t m = 0; m < moments_.size(); ++m) {
    append(moments_[m][i], in_parts, group.moments[m]);
  }
  if (is_low_precision(parameter.scalar_type())) {
    append(parameter, in_parts, group.copies);
  } else {
    group.copies.resize(group.parameters.size());
  }
}

UpdateGroup Optimizer::group_of(size_t first, size_t count, bool decay) const {
  UpdateGroup group;
  group.step = steps();
  group.weight_decay = decay ? config_.weight_decay : 0.0;
  group.gradient_scale = gradient_scale_;
  group.moments.resize(moments_.size());
  for (size_t i = first; i < first + count; ++i) {
    if (segments_[i].decay == decay) append_segment(i, group);
  }
  return group;
}

void Optimizer::step(double lr) {
  for (size_t i = 0; i < segments_.size(); ++i) require_gradient(i);
  begin_step();
  step(lr, 0, segments_.size());
}

void Optimizer::begin_step(double gradient_scale) {
  for (size_t i = 0; i < segments_.size(); ++i) {
    TS_CHECK(updated_[i], "optim: a step begins, but parameter '",
             segments_[i].name, "' was not updated in step ", steps(), ".");
  }
  updated_.assign(segments_.size(), false);
  gradient_scale_ = gradient_scale;
  steps_.add_(1);
}

void Optimizer::step(double lr, size_t first, size_t count) {
  const at::NoGradGuard no_grad;
  TS_CHECK(first <= segments_.size() && count <= segments_.size() - first,
           "optim: there are ", segments_.size(), " segments, no ", count,
           " from ", first, " on.");
  for (size_t i = first; i < first + count; ++i) {
    require_gradient(i);
    TS_CHECK(!updated_[i], "optim: parameter '", segments_[i].name,
             "' was updated already in step ", steps(), ".");
  }
  for (const bool decay : {false, true}) {
    UpdateGroup group = group_of(first, count, decay);
    group.lr = lr;
    if (!group.parameters.empty()) rule_.update(config_, group);
  }
  for (size_t i = first; i < first + count; ++i) updated_[i] = true;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          std::vector<FlatSegment> segments) {
  return std::make_unique<Optimizer>(update_rule(config.type), config,
                                     std::move(segments));
}

}  // namespace tessera::optim
