#include "tessera/train/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/nn/loss.h"

namespace tessera::train {

MeanLoss mean_loss(models::Decoder& decoder, const data::Dataset& samples,
                   int64_t micro, comm::Group& group) {
  at::NoGradGuard no_grad;
  const int64_t count =
      std::min(samples.sampler().num_samples(), kMaxValidationSamples);
  double sum = 0, weight = 0;
  for (int64_t first = group.rank() * micro; first < count;
       first += group.size() * micro) {
    const auto batch = samples.in_order(first, std::min(micro, count - first));
    const nn::LossSum loss = decoder.loss(batch.inputs, batch.targets);
    sum += loss.sum.item<double>();
    weight += loss.weight.item<double>();
  }
  at::Tensor mine = at::tensor({sum, weight}, at::kDouble);
  at::Tensor all = at::empty({group.size(), 2}, at::kDouble);
  group.all_gather(all, mine).wait();
  const at::Tensor total = all.sum(0);
  const auto tokens = total[1].item<double>();
  return {total[0].item<double>() / tokens, static_cast<int64_t>(tokens)};
}

}  // namespace tessera::train
