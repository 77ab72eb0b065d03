#include "tessera/wrappers/replicas.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/wrappers/detail/device_threads.h"
#include "tessera/wrappers/moe.h"

namespace tessera::wrappers {
namespace {

void require_devices(const std::vector<at::Device>& devices) {
  TS_CHECK(!devices.empty(), "data_parallel: no device. Give at least one.");
  std::set<std::string> gpus;
  for (const at::Device& device : devices) {
    TS_CHECK(device.is_cpu() || gpus.insert(device.str()).second,
             "data_parallel: device ", device,
             " is given twice. Only the CPU "
             "can be several devices.");
  }
}

void require_same_tensors(const torch::OrderedDict<std::string, at::Tensor>& a,
                          const torch::OrderedDict<std::string, at::Tensor>& b,
                          size_t device) {
  TS_CHECK(a.size() == b.size(), "data_parallel: the replica of device ",
           device, " has ", b.size(), " tensors, device 0's module ", a.size(),
           ". All replicas must be built alike.");
  for (size_t i = 0; i < a.size(); ++i) {
    TS_CHECK(a[i].key() == b[i].key() &&
                 a[i].value().sizes() == b[i].value().sizes(),
             "data_parallel: the replica of device ", device, " has '",
             b[i].key(), "' ", b[i].value().sizes(),
             " where device 0's module has '", a[i].key(), "' ",
             a[i].value().sizes(), ". All replicas must be built alike.");
  }
}

size_t index_of(const std::vector<at::Tensor>& tensors, const at::Tensor& one) {
  const auto found = std::find_if(
      tensors.begin(), tensors.end(),
      [&](const at::Tensor& tensor) { return tensor.is_same(one); });
  return found - tensors.begin();
}

// Not seen by version counters: a second forward before the first backward
// writes the same values once more, and must not spoil that backward.
void copy_unseen(const at::Tensor& from, at::Tensor to) {
  const at::AutoDispatchBelowADInplaceOrView unseen;
  if (to.scalar_type() != from.scalar_type()) {
    to.set_data(at::empty_like(from, to.device()));
  }
  to.copy_(from);
}

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

// Adds the seconds of its scope to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() {
    const auto end = std::chrono::steady_clock::now();
    seconds_ += std::chrono::duration<double>(end - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_ =
      std::chrono::steady_clock::now();
};

}  // namespace

Replicas::Replicas(std::vector<ModulePtr> modules,
                   std::vector<at::Device> devices)
    : modules_(std::move(modules)),
      devices_(std::move(devices)),
      parameters_(devices_.size()),
      state_(devices_.size()),
      owner_(devices_.size()),
      traffic_(devices_.size()) {
  require_devices(devices_);
  TORCH_INTERNAL_ASSERT(modules_.size() == devices_.size());
  for (size_t device = 0; device < size(); ++device) collect_tensors(device);
  for (const auto& [name, moe] : mixtures_of(*modules_[0])) {
    TS_CHECK(!moe->has_biases(),
             "data_parallel: the module has a MoE with biases, and each "
             "replica would count a load of its own. Use a bias_rate of 0, or "
             "DistributedDataParallel.");
  }
  threads_ = std::make_unique<DeviceThreads>(devices_);
}

Replicas::~Replicas() = default;

void Replicas::collect_tensors(size_t device) {
  const auto parameters = modules_[device]->named_parameters();
  const auto buffers = modules_[device]->named_buffers();
  require_same_tensors(modules_[0]->named_parameters(), parameters, device);
  require_same_tensors(modules_[0]->named_buffers(), buffers, device);
  for (const auto& item : parameters) {
    const at::Tensor& parameter = item.value();
    TS_CHECK(parameter.device() == devices_[device], "data_parallel: '",
             item.key(), "' lies on ", parameter.device(), ", not on device ",
             device, " (", devices_[device], "). Move the module there first.");
    state_[device].push_back(parameter);
    auto& own = parameters_[device];
    if (index_of(own, parameter) < own.size()) continue;  // tied
    own.push_back(parameter);
    const at::Tensor& original = state_[0][state_[device].size() - 1];
    owner_[device].push_back(index_of(parameters_[0], original));
  }
  for (const auto& item : buffers) state_[device].push_back(item.value());
}

void Replicas::run(size_t active, const std::function<void(size_t)>& work) {
  TORCH_INTERNAL_ASSERT(active <= size());
  threads_->run(active, work);
}

void Replicas::replicate(size_t active) {
  if (active < 2) return;
  const Stopwatch stopwatch(star_seconds_);
  run(active, [this](size_t device) {
    if (device > 0) copy_from_first(device);
  });
  const int64_t bytes = bytes_of(state_[0]);
  for (size_t device = 1; device < active; ++device) {
    traffic_[0].model_out += bytes;
    traffic_[device].model_in += bytes;
  }
}

void Replicas::copy_from_first(size_t device) {
  for (size_t i = 0; i < state_[device].size(); ++i) {
    state_[device][i].set_requires_grad(state_[0][i].requires_grad());
    copy_unseen(state_[0][i], state_[device][i]);
  }
  // In this order a child's mode overrides what its parent's call set.
  const auto from = modules_[0]->modules();
  const auto to = modules_[device]->modules();
  for (size_t i = 0; i < to.size(); ++i) to[i]->train(from[i]->is_training());
}

at::Tensor Replicas::to_first(size_t device, const at::Tensor& gradient) {
  if (device > 0) {
    const auto bytes = static_cast<int64_t>(gradient.nbytes());
    traffic_[device].model_out += bytes;
    traffic_[0].model_in += bytes;
  }
  return gradient.to(devices_[0]);
}

void Replicas::reduce_gradients() {
  const at::NoGradGuard no_grad;
  const Stopwatch stopwatch(star_seconds_);
  for (size_t device = 1; device < size(); ++device) {
    for (size_t i = 0; i < parameters_[device].size(); ++i) {
      const at::Tensor gradient =
          std::exchange(parameters_[device][i].mutable_grad(), {});
      if (!gradient.defined()) continue;
      const at::Tensor moved = to_first(device, gradient);
      at::Tensor& sum = parameters_[0][owner_[device][i]].mutable_grad();
      if (sum.defined()) {
        sum.add_(moved);
      } else {
        sum = moved;
      }
    }
  }
}

Gradients Replicas::sum_on_first(const std::vector<Gradients>& gradients) {
  const at::NoGradGuard no_grad;
  const Stopwatch stopwatch(star_seconds_);
  Gradients sums(parameters_[0].size());
  std::vector<bool> is_ours(sums.size(), false);  // not autograd's memory
  for (size_t device = 0; device < gradients.size(); ++device) {
    for (size_t i = 0; i < gradients[device].size(); ++i) {
      if (!gradients[device][i].defined()) continue;
      const at::Tensor moved = to_first(device, gradients[device][i]);
      const size_t owner = owner_[device][i];
      if (!sums[owner].defined()) {
        sums[owner] = moved;
      } else if (is_ours[owner]) {
        sums[owner].add_(moved);
      } else {
        sums[owner] = sums[owner] + moved;
        is_ours[owner] = true;
      }
    }
  }
  return sums;
}

void Replicas::count_batch(size_t from, size_t to, const at::Tensor& tensor) {
  if (from == to) return;
  traffic_[from].batch_out += static_cast<int64_t>(tensor.nbytes());
  traffic_[to].batch_in += static_cast<int64_t>(tensor.nbytes());
}

}  // namespace tessera::wrappers
