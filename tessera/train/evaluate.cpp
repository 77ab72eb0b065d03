#include "tessera/train/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/core/host_read.h"

namespace tessera::train {

namespace {

int64_t num_validated(const data::Dataset& samples, int64_t most) {
  const int64_t there = samples.sampler().num_samples();
  return most == 0 ? there : std::min(there, most);
}

}  // namespace

Batches validation_batches(const data::Dataset& samples, int64_t micro,
                           int64_t most) {
  const int64_t count = num_validated(samples, most);
  return {.count = (count + micro - 1) / micro,
          .read = [&samples, micro, count](int64_t index) {
            const int64_t first = index * micro;
            return samples.in_order(first, std::min(micro, count - first));
          }};
}

Batches shared_batches(const data::Dataset& samples,
                       const engine::BatchExtent& extent, int64_t most,
                       engine::BatchShare& share) {
  const Batches own = validation_batches(samples, extent.samples, most);
  const auto extent_of = [&samples, extent, most](int64_t index) {
    engine::BatchExtent its = extent;
    its.samples = std::min(
        extent.samples, num_validated(samples, most) - index * extent.samples);
    return its;
  };
  return {.count = own.count,
          .read =
              [&share](int64_t index) {
                TORCH_INTERNAL_ASSERT(share.coming() == index, "batch ", index,
                                      " was not told ahead");
                share.await();
                share.turn();
                return share.microbatch(0);
              },
          .will_read =
              [&share, own, extent_of](int64_t index) {
                const engine::Reading reading{
                    .microbatch = [&](int64_t) { return own.read(index); }};
                share.begin(index, extent_of(index), reading,
                            comm::Mode::kAsync);
              }};
}

MeanLoss mean_loss(const Evaluate& evaluate, const Batches& batches,
                   comm::Group& data, comm::Group& world) {
  at::Tensor sum = at::zeros({}, at::kDouble), weight = sum;
  const auto is_mine = [&](int64_t round) {  // else it only takes part
    return round + data.rank() < batches.count;
  };
  const auto index_of = [&](int64_t round) {
    return is_mine(round) ? round + data.rank() : 0;
  };
  const auto tell = [&](int64_t round) {
    if (batches.will_read && round < batches.count) {
      batches.will_read(index_of(round));
    }
  };
  tell(0);
  for (int64_t round = 0; round < batches.count; round += data.size()) {
    const auto batch = batches.read(index_of(round));
    tell(round + data.size());
    const nn::LossSum loss = evaluate(batch);
    if (!is_mine(round)) continue;
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
