#include "tessera/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <ranges>
#include <set>
#include <utility>

#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/optim/detail/adam_pass.h"
#include "tessera/optim/sign_step.h"

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

at::ScalarType state_type_of(const OptimizerConfig& config,
                             at::ScalarType master) {
  if (config.state_dtype == "bf16") return at::kBFloat16;
  return config.state_dtype == "fp32" ? at::kFloat : master;
}

// What was updated elsewhere; of a device without waiting.
void put_back(const std::vector<std::pair<at::Tensor, at::Tensor>>& updated) {
  for (const auto& [to, from] : updated) to.copy_(from, /*non_blocking=*/true);
}

at::Tensor gradient_as_given(const FlatSegment& segment) {
  return segment.gradient.defined() ? segment.gradient
                                    : segment.parameter.grad();
}

}  // namespace

Optimizer::Optimizer(const UpdateRule& rule, const OptimizerConfig& config,
                     std::vector<FlatSegment> segments,
                     const StateMemory& memory)
    : rule_(rule),
      config_(config),
      segments_(std::move(segments)),
      steps_(at::zeros({}, at::TensorOptions(at::kLong))),
      updated_(segments_.size(), true) {
  const at::NoGradGuard no_grad;
  std::set<std::string> names;
  for (const FlatSegment& segment : segments_) require_usable(segment, names);
  add_ways();
  for (size_t i = 0; i < segments_.size(); ++i) make_states(i, memory);
  name_states();
}

void Optimizer::add_ways() {
  for (const FlatSegment& segment : segments_) {
    const UpdateWay way = segment.sign_rate > 0
                              ? UpdateWay{.rule = &sign_step(),
                                          .betas = {},
                                          .rate = segment.sign_rate}
                              : way_of(config_, rule_, segment.name,
                                       segment.decay, segment.is_matrix);
    const auto found = std::ranges::find(ways_, way);
    way_of_.push_back(found - ways_.begin());
    if (found != ways_.end()) continue;
    ways_.push_back(way);
    configs_.push_back(config_);
    configs_.back().betas = way.betas;
  }
}

// All of one segment's, so that they may lie together.
void Optimizer::make_states(size_t i, const StateMemory& memory) {
  const FlatSegment& segment = segments_[i];
  at::Tensor master = segment.parameter.detach();
  const auto zeros = [&, like = master](at::ScalarType type) {
    return memory ? memory(i, like.sizes(), type) : at::zeros_like(like, type);
  };
  if (is_low_precision(master.scalar_type())) {
    master = zeros(at::kFloat).copy_(master);
  }
  masters_.push_back(master);
  const at::Tensor& first = masters_.front();
  TS_CHECK(master.scalar_type() == first.scalar_type() &&
               master.device() == first.device(),
           "optim: parameter '", segment.name, "' is ", master.scalar_type(),
           " on ", master.device(), " and '", segments_.front().name, "' is ",
           first.scalar_type(), " on ", first.device(),
           ". Make one optimizer for each type and device.");
  const auto type = state_type_of(config_, master.scalar_type());
  moments_.emplace_back();
  for (size_t m = way(i).rule->moments_with(config_).size(); m > 0; --m) {
    moments_[i].push_back(zeros(type));
  }
  if (config_.ema > 0) {
    averages_.push_back(zeros(master.scalar_type()).copy_(master));
  }
}

int64_t Optimizer::steps() const { return *steps_.const_data_ptr<int64_t>(); }

// Moment by moment, whichever parameters have it.
void Optimizer::name_states() {
  state_.push_back({"step", "", steps_});
  const auto add = [&](const std::string& kind, size_t i,
                       const at::Tensor& tensor, int gradient_power) {
    const std::string& parameter = segments_[i].name;
    state_.push_back(
        {kind + "." + parameter, parameter, tensor, gradient_power});
  };
  for (size_t i = 0; i < segments_.size(); ++i) {
    const bool has_master =
        is_low_precision(segments_[i].parameter.scalar_type());
    if (has_master) add("master", i, masters_[i], /*gradient_power=*/1);
  }
  bool goes_on = true;
  for (size_t m = 0; goes_on; ++m) {
    goes_on = false;
    for (size_t i = 0; i < segments_.size(); ++i) {
      const auto kept = way(i).rule->moments_with(config_);
      if (m >= kept.size()) continue;
      goes_on = true;
      add(kept[m].name, i, moments_[i][m], kept[m].gradient_power);
    }
  }
  for (size_t i = 0; i < averages_.size(); ++i) {
    add("average", i, averages_[i], /*gradient_power=*/0);
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

bool Optimizer::is_updated_on_host(size_t i) const {
  const at::Tensor& state =
      moments_[i].empty() ? masters_[i] : moments_[i].front();
  return state.is_cpu() && !gradient_as_given(segments_[i]).is_cpu();
}

// As it was reduced: the rule reads it, whatever its type.
at::Tensor Optimizer::gradient_of(size_t i, bool in_parts) const {
  const at::Tensor given = gradient_as_given(segments_[i]).detach();
  if (is_updated_on_host(i)) return begin_to_host(given);
  const at::Tensor gradient = given.to(masters_[i].device());
  const bool as_it_lies = in_parts && is_contiguous_by_parts(gradient);
  return as_it_lies ? gradient : gradient.contiguous();
}

void Optimizer::append_segment(size_t i, UpdateGroup& group,
                               Widened& widened) const {
  at::Tensor parameter = segments_[i].parameter.detach();
  at::Tensor master = masters_[i];
  // A matrix that is needed whole is updated by operators, as it lies.
  if (is_updated_on_host(i) && !needs_whole(i) && !parameter.is_cpu()) {
    const bool is_master = !master.is_cpu();
    const at::Tensor here =
        is_master ? begin_to_host(parameter) : host_memory_for(parameter);
    widened.emplace_back(std::exchange(parameter, here), here);
    if (is_master) master = here;
  }
  const bool in_parts = !needs_whole(i) &&
                        (!parameter.is_contiguous() || !master.is_contiguous());
  append(master, in_parts, group.parameters);
  append(gradient_of(i, in_parts), in_parts, group.gradients);
  group.moments.resize(moments_[i].size());
  for (size_t m = 0; m < moments_[i].size(); ++m) {
    at::Tensor moment = moments_[i][m];
    if (moment.scalar_type() != masters_[i].scalar_type()) {
      widened.emplace_back(moment, moment.to(masters_[i].scalar_type()));
      moment = widened.back().second;
    }
    append(moment, in_parts, group.moments[m]);
  }
  if (is_low_precision(parameter.scalar_type())) {
    append(parameter, in_parts, group.copies);
  } else {
    group.copies.resize(group.parameters.size());
  }
}

UpdateGroup Optimizer::group_of(size_t first, size_t count, size_t way,
                                Widened& widened) const {
  UpdateGroup group;
  group.step = steps();
  group.weight_decay = ways_[way].weight_decay;
  group.gradient_scale = gradient_scale_;
  group.scale_there = scale_there_;
  if (is_paced_) group.pace_there = paces_[static_cast<int64_t>(way)];
  std::optional<at::Device> there;
  for (size_t i = first; i < first + count; ++i) {
    if (way_of_[i] != way) continue;
    append_segment(i, group, widened);
    if (is_updated_on_host(i)) there = gradient_as_given(segments_[i]).device();
  }
  if (there) wait_for_device(*there);
  return group;
}

void Optimizer::step(double lr) {
  for (size_t i = 0; i < segments_.size(); ++i) require_gradient(i);
  begin_step();
  step(lr, 0, segments_.size());
}

bool Optimizer::reads_there() const {
  return !masters_.empty() &&
         std::ranges::all_of(
             ways_,
             [](const UpdateWay& way) { return way.rule->pace != nullptr; }) &&
         std::ranges::all_of(masters_, detail::reads_there) &&
         std::ranges::none_of(
             std::views::iota(size_t{0}, segments_.size()),
             [this](size_t i) { return is_updated_on_host(i); }) &&
         std::ranges::none_of(segments_, [](const FlatSegment& segment) {
           return segment.parameter.scalar_type() == at::kHalf ||
                  gradient_as_given(segment).scalar_type() == at::kHalf;
         });
}

// In the same memory in every step.
void Optimizer::send_pace(double lr) {
  const auto numbers = static_cast<int64_t>(kPaceNumbers);
  const at::Tensor here =
      at::empty({static_cast<int64_t>(ways_.size()), numbers}, at::kDouble);
  auto* next = here.mutable_data_ptr<double>();
  for (size_t way = 0; way < ways_.size(); ++way) {
    UpdateGroup group;
    group.step = steps() + 1;
    group.lr = lr_of(way, lr);
    group.weight_decay = ways_[way].weight_decay;
    next = std::ranges::copy(ways_[way].rule->pace(configs_[way], group), next)
               .out;
  }
  const at::Device device = masters_.front().device();
  if (!paces_.defined()) {
    paces_ = at::empty(here.sizes(), here.options().device(device));
  }
  paces_.copy_(sent_to(here, device));
}

void Optimizer::take_back_step() {
  steps_.sub_(1);
  updated_.assign(segments_.size(), true);
}

double Optimizer::lr_of(size_t way, double lr) const {
  return ways_[way].rate > 0 ? ways_[way].rate : lr * ways_[way].lr_factor;
}

void Optimizer::begin_step(double gradient_scale, at::Tensor scale_there,
                           bool paced) {
  TS_CHECK(!swapped_, "optim: a step begins with averages for parameters.");
  for (size_t i = 0; i < segments_.size(); ++i) {
    TS_CHECK(updated_[i], "optim: a step begins, but parameter '",
             segments_[i].name, "' was not updated in step ", steps(), ".");
  }
  updated_.assign(segments_.size(), false);
  gradient_scale_ = gradient_scale;
  scale_there_ = std::move(scale_there);
  is_paced_ = paced;
  steps_.add_(1);
}

bool Optimizer::needs_whole(size_t segment) const {
  return way(segment).rule->of_whole != nullptr;
}

at::Tensor Optimizer::piece(size_t i) {
  const at::NoGradGuard no_grad;
  require_gradient(i);
  Widened widened;
  const UpdateGroup group = group_of(i, 1, way_of_[i], widened);
  at::Tensor piece = way(i).rule->piece(configs_[way_of_[i]], group);
  put_back(widened);
  return piece.to(gradient_as_given(segments_[i]).device());
}

WholePiece Optimizer::piece_as_whole(size_t i) {
  return {piece(i), std::vector<int64_t>(masters_[i].dim(), 0)};
}

void Optimizer::step(double lr, size_t first, size_t count) {
  step(lr, first, count, [this](size_t i) { return piece_as_whole(i); });
}

void Optimizer::step(double lr, size_t first, size_t count,
                     const WholeOf& whole_of) {
  const at::NoGradGuard no_grad;
  TS_CHECK(first <= segments_.size() && count <= segments_.size() - first,
           "optim: there are ", segments_.size(), " segments, no ", count,
           " from ", first, " on.");
  for (size_t i = first; i < first + count; ++i) {
    require_gradient(i);
    TS_CHECK(!updated_[i], "optim: parameter '", segments_[i].name,
             "' was updated already in step ", steps(), ".");
  }
  // Weights may have been read since the optimizer was made.
  if (steps() == 1) {
    for (size_t i = first; i < first + count; ++i) {
      const at::Tensor& parameter = segments_[i].parameter;
      if (is_low_precision(parameter.scalar_type())) {
        masters_[i].copy_(parameter);
      }
      if (!averages_.empty()) averages_[i].copy_(masters_[i]);
    }
  }
  // Copies of narrow moments are there of one segment at a time.
  const size_t most = config_.state_dtype == "auto" ? count : 1;
  for (size_t begin = first; begin < first + count; begin += most) {
    for (size_t way = 0; way < ways_.size(); ++way) {
      if (ways_[way].rule->of_whole == nullptr) update(lr, begin, most, way);
    }
  }
  for (size_t i = first; i < first + count; ++i) {
    if (needs_whole(i)) update_matrix(lr, i, whole_of);
    if (!averages_.empty()) {
      averages_[i].lerp_(masters_[i].to(averages_[i].device()),
                         1 - config_.ema);
    }
    updated_[i] = true;
  }
}

void Optimizer::update(double lr, size_t first, size_t count, size_t way) {
  Widened widened;
  UpdateGroup group = group_of(first, count, way, widened);
  if (group.parameters.empty()) return;
  group.lr = lr_of(way, lr);
  ways_[way].rule->update(configs_[way], group);
  put_back(widened);
}

// Its momentum was moved on by piece().
void Optimizer::update_matrix(double lr, size_t i, const WholeOf& whole_of) {
  const OptimizerConfig& config = configs_[way_of_[i]];
  WholePiece piece = whole_of(i);
  Direction direction = way(i).rule->of_whole(config, std::move(piece.whole));
  for (int64_t dim = 0; dim < masters_[i].dim(); ++dim) {
    direction.tensor = direction.tensor.narrow(dim, piece.offset.at(dim),
                                               masters_[i].size(dim));
  }
  direction.tensor = direction.tensor.to(masters_[i].device());
  UpdateGroup group;
  group.lr = lr * way(i).lr_factor;
  group.weight_decay = way(i).weight_decay;
  group.parameters = {masters_[i]};
  const at::Tensor parameter = segments_[i].parameter.detach();
  group.copies.resize(1);
  if (is_low_precision(parameter.scalar_type())) group.copies = {parameter};
  group.directions = {std::move(direction)};
  way(i).rule->update(config, group);
}

void Optimizer::swap_averages() {
  const at::NoGradGuard no_grad;
  // A stage of a pipeline may train nothing.
  TS_CHECK(config_.ema > 0 && steps() > 0,
           "optim: there are no averages of parameters. Set optimizer.ema.");
  for (size_t i = 0; i < segments_.size(); ++i) {
    const at::Tensor parameter = segments_[i].parameter.detach();
    if (is_low_precision(parameter.scalar_type())) {
      parameter.copy_(swapped_ ? masters_[i] : averages_[i]);
      continue;
    }
    const at::Tensor before = parameter.clone();
    parameter.copy_(averages_[i]);
    averages_[i].copy_(before);
  }
  swapped_ = !swapped_;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          std::vector<FlatSegment> segments,
                                          const StateMemory& memory) {
  return std::make_unique<Optimizer>(update_rule(config.type), config,
                                     std::move(segments), memory);
}

}  // namespace tessera::optim
