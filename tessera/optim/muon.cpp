#include "tessera/optim/muon.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/optim/gradient_norm.h"

namespace tessera::optim {
namespace {

// Chosen for their slope at zero; they converge to 0.7 to 1.2 and not to 1.
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

at::ScalarType type_of_products(const OptimizerConfig& config,
                                const UpdateGroup& group) {
  const bool narrow =
      config.muon.dtype == "bf16" || group.copies.front().defined();
  return narrow ? at::kBFloat16 : group.parameters.front().scalar_type();
}

at::Tensor orthogonalised(at::Tensor x, const MuonConfig& config) {
  const bool is_tall = x.size(0) > x.size(1);
  if (is_tall) x = x.t();
  x.div_(x.norm().clamp_min(config.eps));
  for (int64_t i = 0; i < config.steps; ++i) {
    at::Tensor polynomial = x.matmul(x.t());
    polynomial = at::addmm(polynomial, polynomial, polynomial, kB, kC);
    x = at::addmm(x, polynomial, x, kA);
  }
  return is_tall ? x.t() : x;
}

double scale_of(const at::Tensor& matrices, const MuonConfig& config) {
  const auto rows = static_cast<double>(matrices.size(-2));
  const auto columns = static_cast<double>(matrices.size(-1));
  return config.adjust_lr == "original"
             ? std::sqrt(std::max(1.0, rows / columns))
             : 0.2 * std::sqrt(std::max(rows, columns));
}

}  // namespace

at::Tensor muon_piece(const OptimizerConfig& config, const UpdateGroup& group) {
  const at::Tensor& like = group.parameters.front();
  const at::Tensor gradient = group.gradients.front().to(like.scalar_type());
  const double momentum = config.muon.momentum;
  scale_gradients({gradient}, group.gradient_scale);
  at::Tensor average = group.moments.front().front();
  average.lerp_(gradient, 1 - momentum);
  const at::Tensor piece =
      config.muon.nesterov ? gradient.lerp(average, momentum) : average.clone();
  return piece.to(type_of_products(config, group)).contiguous();
}

Direction muon_direction(const OptimizerConfig& config, at::Tensor whole) {
  const double scale = scale_of(whole, config.muon);
  if (whole.dim() == 2) {
    return {orthogonalised(std::move(whole), config.muon), scale};
  }
  for (const at::Tensor& each : whole.unbind(0)) {
    each.copy_(orthogonalised(each, config.muon));
  }
  return {std::move(whole), scale};
}

void muon(const OptimizerConfig& /*config*/, const UpdateGroup& group) {
  for (size_t i = 0; i < group.parameters.size(); ++i) {
    at::Tensor parameter = group.parameters[i];
    const Direction& direction = group.directions[i];
    parameter.mul_(1 - group.lr * group.weight_decay);
    parameter.add_(direction.tensor, -group.lr * direction.scale);
    if (group.copies[i].defined()) group.copies[i].copy_(parameter);
  }
}

}  // namespace tessera::optim
