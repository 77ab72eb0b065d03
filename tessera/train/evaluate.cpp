#include "tessera/train/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/core/host_read.h"

namespace tessera::train {

Batches validation_batches(const data::Dataset& samples, int64_t micro,
                           int64_t most) {
  const int64_t there = samples.sampler().num_samples();
  const int64_t count = most == 0 ? there : std::min(there, most);
  return {.count = (count + micro - 1) / micro,
          .read = [&samples, micro, count](int64_t index) {
            const int64_t first = index * micro;
            return samples.in_order(first, std::min(micro, count - first));
          }};
}

MeanLoss mean_loss(const Evaluate& evaluate, const Batches& batches,
                   comm::Group& data, comm::Group& world) {
  at::Tensor sum = at::zeros({}, at::kDouble), weight = sum;
  for (int64_t round = 0; round < batches.count; round += data.size()) {
    const int64_t index = round + data.rank();
    const bool mine = index < batches.count;  // else it only takes part
    const auto batch = batches.read(mine ? index : 0);
    const nn::LossSum loss = evaluate(batch);
    if (!mine) continue;
    sum = sum + loss.sum;
    weight = weight + loss.weight;
  }
  at::Tensor mine = read_on_host(at::stack({sum, weight}));
  at::Tensor all = at::empty({world.size(), 2}, at::kDouble);
  world.all_gather(all, mine).synchronize();
  const at::Tensor total = all.sum(0);
  const auto tokens = total[1].item<double>();
  return {total[0].item<double>() / tokens, static_cast<int64_t>(tokens)};
}

}  // namespace tessera::train
