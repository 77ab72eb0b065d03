#include "tessera/nn/loss.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "tessera/core/error.h"
#include "tessera/core/ignore_index.h"
#include "tessera/nn/detail/one_pass.h"
#include "tessera/nn/detail/second_derivatives.h"
#include "tessera/nn/kernel_choice.h"
#include "tessera/nn/matmul.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

at::Tensor summed_by_tensors(at::Tensor logits, const at::Tensor& targets,
                             const at::Tensor& is_target,
                             std::optional<double> scale) {
  const int64_t rows = logits.size(0);
  const int64_t step = rows_at_once(logits.size(1), logits.is_cpu());
  const auto type = wide_type(logits);
  const at::Tensor column = targets.masked_fill(~is_target, 0).unsqueeze(1);
  const at::Tensor weight = is_target.to(type).unsqueeze(1);
  at::Tensor sum = at::zeros({}, logits.options().dtype(at::kDouble));
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    const auto part = [&](const at::Tensor& t) {
      return t.narrow(0, begin, count);
    };
    at::Tensor log_p = at::log_softmax(part(logits), 1, type);
    const at::Tensor picked = log_p.gather(1, part(column));
    sum.sub_((picked * part(weight)).sum(at::kDouble));
    if (scale) {
      log_p.exp_().scatter_add_(1, part(column), at::full_like(picked, -1.0));
      part(logits).copy_(log_p.mul_(part(weight) * *scale));
    }
  }
  return sum;
}

at::Tensor summed_here(const at::Tensor& logits, const at::Tensor& targets,
                       const at::Tensor& is_target,
                       std::optional<double> scale) {
  const bool has_rows =
      logits.is_cpu() ? logits.is_contiguous() : logits.stride(1) == 1;
  const bool in_one_pass =
      has_rows && detail::has_loops(logits) && uses(Kernel::kCrossEntropy);
  if (!in_one_pass) {
    return summed_by_tensors(logits, targets, is_target, scale);
  }
  return detail::cross_entropy(logits, targets.contiguous(), kIgnoreIndex,
                               scale);
}

using LossOf =
    std::function<at::Tensor(const at::Tensor&, std::optional<double> scale)>;

// The gradient takes the place of the logits, which are not needed again.
class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& logits, const LossOf& loss_of) {
    const at::Tensor gradient = logits.detach();
    ctx->saved_data["gradient"] = gradient;
    return loss_of(gradient, 1.0);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      const torch::autograd::variable_list& gradients) {
    detail::refuse_second_derivatives("The cross-entropy");
    at::Tensor gradient = ctx->saved_data["gradient"].toTensor();
    TS_CHECK(gradient.defined(),
             "cross_entropy: its gradient was used up by a first backward; "
             "call it again for a second one.");
    ctx->saved_data["gradient"] = at::Tensor();
    gradient.mul_(gradients[0]);
    return {gradient, {}};
  }
};

// On a GPU with rows of zeros behind its own, where their number is odd to it:
// cuBLAS takes seven times as long for a vocabulary of 50257 as for 50304.
at::Tensor aligned(const at::Tensor& weight) {
  constexpr int64_t kNeeded = 8, kGiven = 64;
  const int64_t rows = weight.size(0);
  if (weight.is_cpu() || rows % kNeeded == 0) return weight;
  const int64_t all = (rows + kGiven - 1) / kGiven * kGiven;
  at::Tensor given = at::zeros({all, weight.size(1)}, weight.options());
  given.narrow(0, 0, rows).copy_(weight);
  return given;
}

}  // namespace

int64_t rows_at_once(int64_t columns, bool on_cpu) {
  if (!on_cpu) return std::numeric_limits<int32_t>::max();
  constexpr int64_t kElements = int64_t{1} << 18;
  return std::max<int64_t>(1, kElements / std::max<int64_t>(1, columns));
}

LossSum cross_entropy(at::Tensor logits, const at::Tensor& targets,
                      const SummedLoss& summed, std::optional<double> scale) {
  const int64_t rows = targets.numel();
  TS_CHECK(
      c10::multiply_integers(logits.sizes().slice(0, logits.dim() - 1)) == rows,
      "cross_entropy: logits ", logits.sizes(), " and targets ",
      targets.sizes(), " do not belong together.");
  TS_CHECK(targets.scalar_type() == at::kLong, "cross_entropy: targets are ",
           targets.scalar_type(), ", not int64.");
  TS_CHECK(targets.device() == logits.device(), "cross_entropy: logits on ",
           logits.device(), " and targets on ", targets.device(), ".");
  const at::Tensor flat_logits = logits.reshape({rows, logits.size(-1)});
  TS_CHECK(!scale || flat_logits.is_alias_of(logits), "cross_entropy: logits ",
           logits.sizes(), " of strides ", logits.strides(),
           " are no view of rows, into which their gradient could go.");
  const at::Tensor flat = targets.reshape({-1});
  const at::Tensor is_target = flat != kIgnoreIndex;
  const LossOf loss_of = [&](const at::Tensor& given,
                             std::optional<double> by) {
    return (summed ? summed : summed_here)(given, flat, is_target, by);
  };
  const bool recorded =
      !scale && at::GradMode::is_enabled() && flat_logits.requires_grad();
  const at::Tensor sum = recorded ? CrossEntropy::apply(flat_logits, loss_of)
                                  : loss_of(flat_logits.detach(), scale);
  return {sum, is_target.sum().to(at::kDouble)};
}

int64_t head_rows(int64_t rows, int64_t columns, bool on_cpu) {
  constexpr int64_t kLogits = int64_t{1} << 22, kFewRows = 512;
  constexpr int64_t kDeviceLogits = int64_t{1} << 28;
  if (!uses(Kernel::kHeadByRows)) return std::max<int64_t>(1, rows);
  const int64_t logits = on_cpu ? kLogits : kDeviceLogits;
  const int64_t most =
      std::max(kFewRows, logits / std::max<int64_t>(1, columns));
  const int64_t lots = std::max<int64_t>(1, (rows + most - 1) / most);
  return std::max<int64_t>(1, (rows + lots - 1) / lots);
}

LossSum head_loss(const Head& head, at::Tensor hidden,
                  const at::Tensor& targets, std::optional<double> scale) {
  const at::Tensor& weight = head.weight;
  if (!scale && at::GradMode::is_enabled()) {
    return cross_entropy(linear_product(hidden, weight), targets, head.summed);
  }
  const at::NoGradGuard no_grad;
  const at::Tensor all = hidden.detach().view({-1, weight.size(1)});
  const at::Tensor flat = targets.reshape({-1});
  const int64_t rows = all.size(0);
  TS_CHECK(hidden.size(-1) == weight.size(1) && flat.size(0) == rows,
           "head_loss: hidden states ", hidden.sizes(), ", a head ",
           weight.sizes(), " and targets ", targets.sizes(),
           " do not belong together.");
  const int64_t step = head_rows(rows, head.columns, all.is_cpu());
  const at::Tensor rows_of_head = aligned(weight.detach());
  const int64_t columns = weight.size(0),
                beside = rows_of_head.size(0) - columns;
  const at::Tensor logits = at::empty({step, columns + beside}, all.options());
  const auto sums = all.options().dtype(at::kDouble);
  LossSum loss{at::zeros({}, sums), at::zeros({}, sums)};
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    const at::Tensor x = all.narrow(0, begin, count);
    const at::Tensor whole = logits.narrow(0, 0, count);
    const at::Tensor y = whole.narrow(1, 0, columns);
    product_into(whole, x, rows_of_head.t());
    const LossSum part =
        cross_entropy(y, flat.narrow(0, begin, count), head.summed, scale);
    loss.sum.add_(part.sum);
    loss.weight.add_(part.weight);
    if (!scale) continue;
    if (weight.requires_grad()) add_weight_gradient(weight, y, x);
    if (beside > 0) whole.narrow(1, columns, beside).zero_();
    product_into(x, whole, rows_of_head);
  }
  return loss;
}

}  // namespace tessera::nn
