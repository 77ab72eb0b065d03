#include "tessera/wrappers/distributed_data_parallel.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "tessera/wrappers/detail/gradient_reducer.h"
#include "tessera/wrappers/detail/same_parameters.h"
#include "tessera/wrappers/sync_batch_norm.h"

namespace tessera::wrappers {
namespace {

std::vector<NamedParameter> parameters_of(torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& item : module.named_parameters()) {
    parameters.push_back({item.key(), item.value()});
  }
  return parameters;
}

}  // namespace

DistributedDataParallelCore::DistributedDataParallelCore(
    torch::nn::Module& module, comm::Group& group,
    const DistributedDataParallelOptions& options)
    : module_(module), group_(group), options_(options) {
  require_same_parameters(parameters_of(module), group);
  broadcast_all(module.parameters(), group, /*root=*/0);
  broadcast_all(module.buffers(), group, /*root=*/0);
  reducer_ =
      std::make_unique<GradientReducer>(parameters_of(module), group, options);
}

DistributedDataParallelCore::~DistributedDataParallelCore() = default;
DistributedDataParallelCore::DistributedDataParallelCore(
    DistributedDataParallelCore&&) noexcept = default;

void DistributedDataParallelCore::before_forward() {
  reducer_->prepare();
  if (!options_.broadcast_buffers || !module_.is_training()) return;
  // Once a step, however many micro-batches.
  const int64_t step = reducer_->num_reductions();
  if (std::exchange(buffers_step_, step) == step) return;
  broadcast_all(module_.buffers(), group_, /*root=*/0);
}

void DistributedDataParallelCore::accumulate(const at::Tensor& loss) {
  reducer_->accumulate(loss);
}

void DistributedDataParallelCore::backward(const at::Tensor& loss) {
  reducer_->backward(loss);
}

void DistributedDataParallelCore::join() {
  require_joinable(module_);
  do {
    before_forward();
  } while (reducer_->stand_by() > 0);
}

}  // namespace tessera::wrappers
