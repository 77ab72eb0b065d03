#include "tessera/parallel/tensor/vocabulary_loss.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "tessera/core/error.h"
#include "tessera/nn/wide_type.h"

namespace tessera::parallel::tensor {
namespace {

void check_targets(const at::Tensor& targets, const at::Tensor& is_target,
                   int64_t vocabulary) {
  const at::Tensor legal =
      (~is_target).logical_or((targets >= 0).logical_and(targets < vocabulary));
  const at::Tensor all = legal.all();
  const auto fault =
      c10::str("cross_entropy: a target is outside the vocabulary of ",
               vocabulary, " entries.");
  // A device checks for itself: the host would have to wait for it.
  if (!all.is_cpu()) return at::_assert_async(all, fault);
  TS_CHECK(*all.const_data_ptr<bool>(), fault);
}

at::Tensor summed_over_ranks(at::Tensor logits, const at::Tensor& targets,
                             const at::Tensor& is_target,
                             const VocabularyShard& shard,
                             std::optional<double> scale) {
  comm::Group& group = *shard.group;
  const int64_t rows = logits.size(0), columns = logits.size(1);
  const int64_t step = nn::rows_at_once(columns, logits.is_cpu());
  const auto type = nn::wide_type(logits);
  const auto options = logits.options().dtype(type);
  const at::Tensor own = targets - shard.first;
  const at::Tensor is_own =
      is_target.logical_and(own >= 0).logical_and(own < columns);
  const at::Tensor column = own.masked_fill(~is_own, 0).unsqueeze(1);
  const at::Tensor weight = is_target.to(type);

  at::Tensor max = columns > 0 ? logits.amax(1).to(type)
                               : at::full({rows}, -INFINITY, options);
  group.all_reduce(max, comm::ReduceOp::kMax, comm::Mode::kBlocking);
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
  group.all_reduce(parts, comm::ReduceOp::kSum, comm::Mode::kBlocking);
  if (scale) {
    for (int64_t begin = 0; begin < rows && columns > 0; begin += step) {
      const int64_t count = std::min(step, rows - begin);
      const auto part = [&](const at::Tensor& t) {
        return t.narrow(0, begin, count).unsqueeze(1);
      };
      at::Tensor p = shifted(begin, count).exp_().div_(part(parts[0]));
      p.scatter_add_(1, column.narrow(0, begin, count),
                     part(is_own).to(type).neg());
      logits.narrow(0, begin, count).copy_(p.mul_(part(weight) * *scale));
    }
  }
  return ((parts[0].log() - parts[1]) * weight).sum(at::kDouble);
}

}  // namespace

nn::SummedLoss vocabulary_loss(const VocabularyShard& shard) {
  return [shard](const at::Tensor& logits, const at::Tensor& targets,
                 const at::Tensor& is_target, std::optional<double> scale) {
    check_targets(targets, is_target, shard.vocabulary);
    return summed_over_ranks(logits, targets, is_target, shard, scale);
  };
}

}  // namespace tessera::parallel::tensor
