#include "tessera/wrappers/distributed_optimizer.h"

#include <ATen/ATen.h>
#include <torch/serialize.h>

#include <numeric>
#include <sstream>
#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/wrappers/detail/gradient_cycle.h"
#include "tessera/wrappers/detail/gradient_hooks.h"
#include "tessera/wrappers/detail/same_parameters.h"

namespace tessera {
namespace {

using wrappers::NamedParameter;

// Those that require a gradient, in the order of the optimizer's groups.
std::vector<NamedParameter> parameters_of(torch::optim::Optimizer& optimizer) {
  std::vector<NamedParameter> parameters;
  for (const at::Tensor& parameter : wrappers::distinct_parameters(optimizer)) {
    if (!parameter.requires_grad()) continue;
    parameters.push_back(
        {c10::str("parameter ", parameters.size()), parameter});
  }
  return parameters;
}

std::vector<at::Tensor> tensors_of(
    const std::vector<NamedParameter>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& item : parameters) tensors.push_back(item.parameter);
  return tensors;
}

// A group that no other optimizer has: its thread calls it.
comm::Group& own_group(comm::Communicator& communicator,
                       const DistributedOptimizerOptions& options) {
  std::vector<int64_t> ranks = options.ranks;
  if (ranks.empty()) {
    ranks.resize(communicator.world_size());
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  // Of these ranks: others have optimizers that not all of these have.
  int64_t optimizers = 0;
  for (const comm::Group* group : communicator.groups()) {
    const bool is_optimizer_s = group->name().starts_with("gradients ");
    if (is_optimizer_s && group->ranks() == ranks) ++optimizers;
  }
  comm::Group* group =
      communicator.make_group(ranks, c10::str("gradients ", optimizers));
  TS_CHECK(group != nullptr, "distributed optimizer: rank ",
           communicator.rank(), " is none of its ranks ",
           c10::IntArrayRef(ranks), ". Let those ranks alone make it.");
  return *group;
}

void check_options(const DistributedOptimizerOptions& options) {
  TS_CHECK(options.fusion_threshold >= 0 && options.cycle_time.count() >= 0,
           "distributed optimizer: fusion_threshold (",
           options.fusion_threshold, " bytes) and cycle_time (",
           options.cycle_time.count(), " ms) must be 0 or more.");
  TS_CHECK(options.backward_passes_per_step >= 1,
           "distributed optimizer: backward_passes_per_step (",
           options.backward_passes_per_step, ") must be 1 or more.");
}

}  // namespace

struct DistributedOptimizer::Impl {
  const DistributedOptimizerOptions options;
  const std::vector<NamedParameter> parameters;
  std::unordered_set<const c10::TensorImpl*> known;  // these
  std::vector<int64_t> passes;  // by parameter: since the last step
  bool is_synchronized = false;
  wrappers::GradientCycle cycle;
  wrappers::GradientHooks hooks;  // gone before the cycle

  Impl(torch::optim::Optimizer& optimizer, comm::Group& group,
       const DistributedOptimizerOptions& with)
      : options(with),
        parameters(parameters_of(optimizer)),
        passes(parameters.size(), 0),
        cycle(tensors_of(parameters), group, with) {
    for (size_t p = 0; p < parameters.size(); ++p) {
      const auto& [name, parameter] = parameters[p];
      TS_CHECK_CONFIG(parameter.is_cpu(), "distributed optimizer: ", name,
                      " lies on ", parameter.device(),
                      ", and gradients are packed in memory of the CPU. Use "
                      "DistributedDataParallel, which takes any device.");
      known.insert(parameter.unsafeGetTensorImpl());
      hooks.add(parameter, [this, p] { on_gradient(p); });
    }
  }

  void on_gradient(size_t p) {
    const auto& [name, parameter] = parameters[p];
    is_synchronized = false;
    TS_CHECK(++passes[p] <= options.backward_passes_per_step,
             "distributed optimizer: ", name, " ", parameter.sizes(),
             " got a gradient ", passes[p],
             " times since the last step, but backward_passes_per_step is ",
             options.backward_passes_per_step,
             ". Set it to the number of backward calls before step().");
    if (passes[p] == options.backward_passes_per_step) {
      check_gradient(name, parameter);
      cycle.set_ready(p);
    }
  }

  static void check_gradient(const std::string& name,
                             const at::Tensor& parameter) {
    at::Tensor& gradient = parameter.mutable_grad();
    TS_CHECK(gradient.layout() == at::kStrided &&
                 gradient.scalar_type() == parameter.scalar_type(),
             "distributed optimizer: the gradient of ", name, " is ",
             gradient.layout(), " ", gradient.scalar_type(),
             "; it must be dense and of the parameter's dtype, ",
             parameter.scalar_type(), ".");
    const at::NoGradGuard no_grad;
    if (!gradient.is_contiguous()) gradient = gradient.contiguous();
  }

  // Of others ranks would go on with gradients of their own.
  void require_known(torch::optim::Optimizer& optimizer) const {
    int64_t place = 0;
    for (auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        TS_CHECK(
            !parameter.requires_grad() ||
                known.contains(parameter.unsafeGetTensorImpl()),
            "distributed optimizer: the optimizer's tensor ", place, " ",
            parameter.sizes(),
            " (counted over its groups, from 0) requires a gradient, and did "
            "not, or was not there, when DistributedOptimizer was made: nobody "
            "averages it. Make DistributedOptimizer anew, of all that will be "
            "trained.");
        ++place;
      }
    }
  }

  void synchronize() {
    for (const auto& [name, parameter] : parameters) {
      if (parameter.grad().defined()) check_gradient(name, parameter);
    }
    cycle.finish();
    passes.assign(passes.size(), 0);
    is_synchronized = true;
  }
};

DistributedOptimizer::DistributedOptimizer(
    torch::optim::Optimizer& optimizer, comm::Communicator& communicator,
    const DistributedOptimizerOptions& options)
    : optimizer_(optimizer) {
  check_options(options);
  comm::Group& group = own_group(communicator, options);
  wrappers::require_same_parameters(parameters_of(optimizer), group);
  impl_ = std::make_unique<Impl>(optimizer, group, options);
}

DistributedOptimizer::~DistributedOptimizer() = default;

void DistributedOptimizer::synchronize() { impl_->synchronize(); }

void DistributedOptimizer::step() {
  impl_->require_known(optimizer_);
  if (!impl_->is_synchronized) impl_->synchronize();
  impl_->is_synchronized = false;
  optimizer_.step();
}

int64_t DistributedOptimizer::num_reductions() const {
  return impl_->cycle.num_reductions();
}

void broadcast_parameters(torch::nn::Module& module, comm::Group& group,
                          int64_t root) {
  wrappers::require_no_parts(module, group);
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  wrappers::broadcast_all(tensors, group, root);
}

// As LibTorch saves an optimizer: by the place of a parameter, not its address.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer,
                               comm::Group& group, int64_t root) {
  const bool is_root = group.rank() == root;
  std::string bytes;
  if (is_root) {
    std::ostringstream out;
    torch::save(optimizer, out);
    bytes = out.str();
  }
  at::Tensor size = at::tensor({static_cast<int64_t>(bytes.size())}, at::kLong);
  group.broadcast(size, root).synchronize();
  bytes.resize(size.item<int64_t>());
  const at::Tensor data = at::from_blob(
      bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte);
  group.broadcast(data, root).synchronize();
  if (is_root) return;
  optimizer.state().clear();
  std::istringstream in(bytes);
  torch::load(optimizer, in);
}

}  // namespace tessera
