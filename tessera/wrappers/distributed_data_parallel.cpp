#include "tessera/wrappers/distributed_data_parallel.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/wrappers/detail/gradient_reducer.h"
#include "tessera/wrappers/detail/same_parameters.h"
#include "tessera/wrappers/sync_batch_norm.h"

namespace tessera::wrappers {

DistributedDataParallelCore::DistributedDataParallelCore(
    torch::nn::Module& module, comm::Group& group,
    const DistributedDataParallelOptions& options)
    : module_(module), group_(group), options_(options) {
  const auto parameters = parameters_of(module);
  require_same_parameters(parameters, group);
  require_no_parts(module, group);
  require_whole_gradients(module);
  broadcast_all(module.parameters(), group, /*root=*/0);
  broadcast_all(module.buffers(), group, /*root=*/0);
  reducer_ = std::make_unique<GradientReducer>(parameters, group, options);
  for (const auto& [name, parameter] : parameters) {
    trains_.push_back(parameter.requires_grad());
  }
}

DistributedDataParallelCore::~DistributedDataParallelCore() = default;
DistributedDataParallelCore::DistributedDataParallelCore(
    DistributedDataParallelCore&&) noexcept = default;

void DistributedDataParallelCore::before_forward() {
  require_same_to_train();
  reducer_->prepare();
  if (!options_.broadcast_buffers || !module_.is_training()) return;
  // Once a step, however many micro-batches.
  const int64_t step = reducer_->num_reductions();
  if (std::exchange(buffers_step_, step) == step) return;
  const auto buffers = module_.buffers();
  if (buffers.empty()) return;
  const int64_t root = root_of_buffers();
  if (root < group_.size()) broadcast_all(buffers, group_, root);
}

// The first rank that has data, whose buffers are the newest; their number
// where none has.
int64_t DistributedDataParallelCore::root_of_buffers() {
  if (!reducer_->some_have_joined()) return 0;
  at::Tensor first =
      at::full({1}, has_joined_ ? group_.size() : group_.rank(), at::kLong);
  group_.all_reduce(first, comm::ReduceOp::kMin).synchronize();
  return first.item<int64_t>();
}

// Of others nobody would reduce the gradients.
void DistributedDataParallelCore::require_same_to_train() const {
  const auto now = parameters_of(module_);
  TS_CHECK(now.size() == trains_.size(), "data parallel: the module has ",
           now.size(), " parameters, and had ", trains_.size(),
           " when it was wrapped. Register them all before.");
  for (size_t i = 0; i < now.size(); ++i) {
    TS_CHECK(trains_[i] || !now[i].parameter.requires_grad(),
             "data parallel: ", now[i].name,
             " requires a gradient, and did not when the module was wrapped: "
             "nobody would reduce it. Wrap the module anew.");
  }
}

void DistributedDataParallelCore::accumulate(const at::Tensor& loss) {
  reducer_->accumulate(loss);
}

void DistributedDataParallelCore::backward(const at::Tensor& loss) {
  reducer_->backward(loss);
}

void DistributedDataParallelCore::join() {
  require_joinable(module_);
  has_joined_ = true;
  const auto ends = c10::make_scope_exit([this] { has_joined_ = false; });
  // The same on all ranks behind a join() before.
  const int64_t reductions = reducer_->num_reductions();
  do {
    before_forward();
  } while (reducer_->stand_by() > 0);
  take_newest(reductions);
}

// Who had the most batches has seen every update.
void DistributedDataParallelCore::take_newest(int64_t reductions) {
  const int64_t size = group_.size();
  at::Tensor most =
      at::full({1}, reductions * size + size - 1 - group_.rank(), at::kLong);
  group_.all_reduce(most, comm::ReduceOp::kMax).synchronize();
  const int64_t root = size - 1 - most.item<int64_t>() % size;
  broadcast_all(module_.parameters(), group_, root);
  broadcast_all(module_.buffers(), group_, root);
}

}  // namespace tessera::wrappers
