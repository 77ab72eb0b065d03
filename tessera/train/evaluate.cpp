#include "tessera/train/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tessera::train {

MeanLoss mean_loss(const Evaluate& evaluate, const data::Dataset& samples,
                   int64_t micro, comm::Group& data, comm::Group& world) {
  const int64_t count =
      std::min(samples.sampler().num_samples(), kMaxValidationSamples);
  double sum = 0, weight = 0;
  for (int64_t round = 0; round < count; round += data.size() * micro) {
    const int64_t first = round + data.rank() * micro;
    const bool mine = first < count;  // else it only takes part
    const int64_t begin = mine ? first : 0;
    const auto batch = samples.in_order(begin, std::min(micro, count - begin));
    const nn::LossSum loss = evaluate(batch);
    if (!mine) continue;
    sum += loss.sum.item<double>();
    weight += loss.weight.item<double>();
  }
  at::Tensor mine = at::tensor({sum, weight}, at::kDouble);
  at::Tensor all = at::empty({world.size(), 2}, at::kDouble);
  world.all_gather(all, mine).wait();
  const at::Tensor total = all.sum(0);
  const auto tokens = total[1].item<double>();
  return {total[0].item<double>() / tokens, static_cast<int64_t>(tokens)};
}

}  // namespace tessera::train
