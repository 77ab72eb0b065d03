#include "tessera/nn/loss.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "tessera/core/error.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

// Rows whose logits stay in the cache while several passes go over them.
int64_t rows_at_once(int64_t vocab) {
  constexpr int64_t kElements = int64_t{1} << 18;
  return std::max<int64_t>(1, kElements / std::max<int64_t>(1, vocab));
}

// The summed loss of `logits` (N, V). With `overwrite`, the rows become the
// gradient of that sum.
at::Tensor summed(at::Tensor logits, const at::Tensor& targets,
                  const at::Tensor& is_target, bool overwrite) {
  const int64_t rows = logits.size(0), step = rows_at_once(logits.size(1));
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
    if (overwrite) {
      log_p.exp_().scatter_add_(1, part(column), at::full_like(picked, -1.0));
      part(logits).copy_(log_p.mul_(part(weight)));
    }
  }
  return sum;
}

// The same of logits of which every rank of the shard's group has a part of the
// columns.
at::Tensor summed_over_ranks(at::Tensor logits, const at::Tensor& targets,
                             const at::Tensor& is_target,
                             const VocabularyShard& shard, bool overwrite) {
  const int64_t rows = logits.size(0), columns = logits.size(1);
  const int64_t step = rows_at_once(columns);
  const auto type = wide_type(logits);
  const auto options = logits.options().dtype(type);
  const at::Tensor own = targets - shard.first;
  const at::Tensor is_own =
      is_target.logical_and(own >= 0).logical_and(own < columns);
  const at::Tensor column = own.masked_fill(~is_own, 0).unsqueeze(1);
  const at::Tensor weight = is_target.to(type);

  at::Tensor max = columns > 0 ? logits.amax(1).to(type)
                               : at::full({rows}, -INFINITY, options);
  shard.group->all_reduce(max, comm::ReduceOp::kMax, comm::Mode::kBlocking);
  // Of each row: the sum of exponentials, and the target's logit, both less the
  // maximum.
  const at::Tensor parts = at::zeros({2, rows}, options);
  const auto shifted = [&](int64_t begin, int64_t count) {
    return logits.narrow(0, begin, count).to(type) -
           max.narrow(0, begin, count).unsqueeze(1);
  };
  for (int64_t begin = 0; begin < rows && columns > 0; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    const at::Tensor z = shifted(begin, count);
    const at::Tensor picked = z.gather(1, column.narrow(0, begin, count));
    parts[1]
        .narrow(0, begin, count)
        .copy_(
            picked.squeeze(1).masked_fill(~is_own.narrow(0, begin, count), 0));
    parts[0].narrow(0, begin, count).copy_(z.exp().sum(1));
  }
  shard.group->all_reduce(parts, comm::ReduceOp::kSum, comm::Mode::kBlocking);
  if (overwrite) {
    for (int64_t begin = 0; begin < rows && columns > 0; begin += step) {
      const int64_t count = std::min(step, rows - begin);
      const auto part = [&](const at::Tensor& t) {
        return t.narrow(0, begin, count).unsqueeze(1);
      };
      at::Tensor p = shifted(begin, count).exp_().div_(part(parts[0]));
      p.scatter_add_(1, column.narrow(0, begin, count),
                     part(is_own).to(type).neg());
      logits.narrow(0, begin, count).copy_(p.mul_(part(weight)));
    }
  }
  return ((parts[0].log() - parts[1]) * weight).sum(at::kDouble);
}

using SummedLoss = std::function<at::Tensor(const at::Tensor&, bool overwrite)>;

// The gradient takes the place of the logits, which are not needed again.
class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& logits,
                            const SummedLoss& summed) {
    const at::Tensor gradient = logits.detach();
    ctx->saved_data["gradient"] = gradient;
    return summed(gradient, /*overwrite=*/true);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      const torch::autograd::variable_list& gradients) {
    at::Tensor gradient = ctx->saved_data["gradient"].toTensor();
    TS_CHECK(gradient.defined(),
             "cross_entropy: its gradient was used up by a first backward; "
             "call it again for a second one.");
    ctx->saved_data["gradient"] = at::Tensor();
    gradient.mul_(gradients[0]);
    return {gradient, {}};
  }
};

LossSum loss_of(const at::Tensor& logits, const at::Tensor& targets,
                const VocabularyShard* shard) {
  const int64_t rows = targets.numel();
  TS_CHECK(
      c10::multiply_integers(logits.sizes().slice(0, logits.dim() - 1)) == rows,
      "cross_entropy: logits ", logits.sizes(), " and targets ",
      targets.sizes(), " do not belong together.");
  TS_CHECK(targets.scalar_type() == at::kLong, "cross_entropy: targets are ",
           targets.scalar_type(), ", not int64.");
  const at::Tensor flat_logits = logits.reshape({rows, logits.size(-1)});
  const at::Tensor flat = targets.reshape({-1});
  const at::Tensor is_target = flat != kIgnoreIndex;
  const SummedLoss summed_loss = [&](const at::Tensor& given, bool overwrite) {
    return shard ? summed_over_ranks(given, flat, is_target, *shard, overwrite)
                 : summed(given, flat, is_target, overwrite);
  };
  const bool recorded =
      at::GradMode::is_enabled() && flat_logits.requires_grad();
  const at::Tensor sum = recorded
                             ? CrossEntropy::apply(flat_logits, summed_loss)
                             : summed_loss(flat_logits, /*overwrite=*/false);
  return {sum, is_target.sum().to(at::kDouble)};
}

}  // namespace

LossSum cross_entropy(at::Tensor logits, const at::Tensor& targets) {
  return loss_of(logits, targets, nullptr);
}

LossSum cross_entropy(at::Tensor logits, const at::Tensor& targets,
                      const VocabularyShard& shard) {
  if (at::isIntegralType(targets.scalar_type(), false)) {
    const at::Tensor legal =
        (targets == kIgnoreIndex)
            .logical_or((targets >= 0).logical_and(targets < shard.vocabulary));
    TS_CHECK(legal.all().item<bool>(),
             "cross_entropy: a target is outside the vocabulary of ",
             shard.vocabulary, " entries.");
  }
  return loss_of(logits, targets, &shard);
}

}  // namespace tessera::nn
