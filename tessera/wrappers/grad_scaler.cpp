#include "tessera/wrappers/grad_scaler.h"

#include <ATen/ATen.h>

#include "tessera/core/error.h"
#include "tessera/wrappers/detail/same_parameters.h"

namespace tessera {

GradScaler::GradScaler(comm::Group& ranks, const optim::LossScaleRule& rule)
    : ranks_(ranks), loss_scale_(rule) {}

// In fp32 at least: the scale may be beyond the range of a loss in fp16.
at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  const bool is_narrow = c10::isReducedFloatingType(loss.scalar_type());
  return (is_narrow ? loss.to(at::kFloat) : loss) * value();
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  TS_CHECK(at_ == At::kBackward,
           "GradScaler: gradients were unscaled already since update(). Call "
           "scale, unscale, step and update, in this order, once a step.");
  const at::NoGradGuard no_grad;
  bool is_finite = true;
  for (const at::Tensor& parameter : wrappers::distinct_parameters(optimizer)) {
    at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    is_finite &= at::isfinite(gradient).all().item<bool>();
    gradient.mul_(1 / value());
  }
  const at::Tensor overflows = at::full({1}, is_finite ? 0 : 1, at::kDouble);
  ranks_.all_reduce(overflows, comm::ReduceOp::kMax).synchronize();
  is_finite_ = overflows.item<double>() == 0;
  at_ = At::kUnscaled;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  TS_CHECK(at_ != At::kStepped,
           "GradScaler: step() was called already since update(). Call "
           "update() once behind it.");
  if (at_ == At::kBackward) unscale(optimizer);
  if (is_finite_) optimizer.step();
  at_ = At::kStepped;
  return is_finite_;
}

void GradScaler::update() {
  TS_CHECK(at_ == At::kStepped,
           "GradScaler: update() without a step(). Call step() before it.");
  loss_scale_.update(is_finite_);
  at_ = At::kBackward;
}

}  // namespace tessera
