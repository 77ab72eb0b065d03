#include "tessera/wrappers/distributed_data_parallel.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/wrappers/detail/gradient_reducer.h"
#include "tessera/wrappers/detail/same_parameters.h"

namespace tessera::wrappers {
namespace {

constexpr size_t kNamedAtMost = 8;  // parameters in one message

std::vector<NamedParameter> parameters_of(torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& item : module.named_parameters()) {
    parameters.push_back({item.key(), item.value()});
  }
  return parameters;
}

}  // namespace

DataParallelCore::DataParallelCore(
    torch::nn::Module& module, comm::Group& group,
    const DistributedDataParallelOptions& options)
    : module_(module), group_(group), options_(options) {
  require_same_parameters(parameters_of(module), group);
  broadcast_all(module.parameters(), group, /*root=*/0);
  broadcast_all(module.buffers(), group, /*root=*/0);
  reducer_ = std::make_unique<GradientReducer>(
      parameters_of(module), group,
      ReducerOptions{.bucket_bytes = options.bucket_bytes,
                     .overlap = options.overlap});
}

DataParallelCore::~DataParallelCore() = default;
DataParallelCore::DataParallelCore(DataParallelCore&&) noexcept = default;

void DataParallelCore::before_forward() {
  if (buffers_are_fresh_) return;  // once a step, however many micro-batches
  if (options_.broadcast_buffers && module_.is_training()) {
    broadcast_all(module_.buffers(), group_, /*root=*/0);
  }
  buffers_are_fresh_ = true;
}

void DataParallelCore::begin_step() {
  if (gradients_are_stale_) reducer_->zero();
  gradients_are_stale_ = false;
}

void DataParallelCore::accumulate(const at::Tensor& loss) {
  begin_step();
  torch::autograd::backward({loss}, {});
}

void DataParallelCore::backward(const at::Tensor& loss) {
  begin_step();
  reducer_->arm();
  torch::autograd::backward({loss}, {});
  const ReducedStep step = reducer_->finish();
  gradients_are_stale_ = true;
  buffers_are_fresh_ = false;
  if (options_.allow_unused) return;
  TS_CHECK(step.missing_here.empty(), "data parallel: no gradient came for ",
           some_of(step.missing_here, kNamedAtMost),
           ". Every parameter must take part in the loss; freeze it "
           "(requires_grad_(false)), or set allow_unused, which makes its "
           "gradient zero.");
  TS_CHECK(step.missing_gradients == 0,
           "data parallel: ", step.missing_gradients,
           " gradients were missing on other ranks, which name them.");
}

void DataParallelCore::join() {
  ReducedStep step;
  do {
    before_forward();
    reducer_->arm();
    step = reducer_->finish(/*active=*/false);
    buffers_are_fresh_ = false;
  } while (step.active_ranks > 0);
}

}  // namespace tessera::wrappers
