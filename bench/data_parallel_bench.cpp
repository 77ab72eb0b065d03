// A training step of DataParallel beside DistributedDataParallel and one
// device: seconds, peak memory and bytes moved, for device 0 and the others.
//
// Model:  Linear(1024, 4096), ReLU, Linear(4096, 1024): S = 32 MiB of fp32
//         parameters; 64 samples a step, shared out; SGD. One intra-op thread
//         a device.
// Units:  *_MiB: peak of tensors that the device allocated; *_in, *_out: MiB a
//         step. DataParallel's are counted, batch included: with N devices a
//         star of (N-1) S at device 0. DistributedDataParallel's are those of a
//         ring, 2 (N-1)/N S on every device. star_ms: of the step, the time in
//         which DataParallel copies and sums and no device computes.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <mutex>

#include "tessera/comm/communicator.h"
#include "tessera/optim/optimizer.h"
#include "tessera/wrappers/data_parallel.h"
#include "tessera/wrappers/distributed_data_parallel.h"

namespace tessera {
namespace {

constexpr int64_t kSamples = 64;
constexpr double kMiB = 1 << 20;

thread_local size_t current_device = 0;

// Books what a thread allocates to its device; a free goes to the same account.
class DeviceMemory : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* block, int64_t bytes, size_t, size_t,
                         c10::Device) override {
    const std::lock_guard lock(mutex_);
    if (bytes > 0) owner_[block] = current_device;
    const auto found = owner_.find(block);
    if (found == owner_.end()) return;
    Account& account = accounts_[found->second];
    account.now += bytes;
    account.peak = std::max(account.peak, account.now);
    if (bytes < 0) owner_.erase(found);
  }
  bool memoryProfilingEnabled() const override { return true; }
  double peak_mib(size_t device) {
    const std::lock_guard lock(mutex_);
    return static_cast<double>(accounts_[device].peak) / kMiB;
  }

 private:
  struct Account {
    int64_t now = 0;
    int64_t peak = 0;
  };
  std::mutex mutex_;
  std::map<void*, size_t> owner_;
  std::map<size_t, Account> accounts_;
};

struct Net : torch::nn::Module {
  explicit Net(size_t device) : device(device) {
    current_device = device;
    up = register_module("up", torch::nn::Linear(1024, 4096));
    down = register_module("down", torch::nn::Linear(4096, 1024));
    current_device = 0;
  }
  at::Tensor forward(const at::Tensor& x) {
    current_device = device;
    return down->forward(at::relu(up->forward(x)));
  }
  size_t device;
  torch::nn::Linear up{nullptr}, down{nullptr};
};

std::unique_ptr<optim::Optimizer> make_optimizer(Net& net) {
  std::vector<optim::FlatSegment> segments;
  for (const auto& item : net.named_parameters()) {
    segments.push_back({item.key(), item.value(), {}, false});
  }
  return optim::make_optimizer({.type = "sgd", .weight_decay = 0.0},
                               std::move(segments));
}

void clear_gradients(Net& net) {
  for (at::Tensor& parameter : net.parameters()) {
    parameter.mutable_grad() = at::Tensor();
  }
}

void report_memory(benchmark::State& state, DeviceMemory& memory) {
  state.counters["dev0_MiB"] = memory.peak_mib(0);
  if (state.range(0) > 1) state.counters["other_MiB"] = memory.peak_mib(1);
}

void report_traffic(benchmark::State& state, const std::string& device,
                    double bytes_in, double bytes_out) {
  state.counters[device + "_in"] = bytes_in / kMiB;
  state.counters[device + "_out"] = bytes_out / kMiB;
}

void data_parallel(benchmark::State& state) {
  const auto devices = static_cast<size_t>(state.range(0));
  auto memory = std::make_shared<DeviceMemory>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
  size_t made = 0;
  const auto make = [&] { return std::make_shared<Net>(made++); };
  const auto net = make();
  DataParallel model(net, cpu_devices(devices), make);
  const auto optimizer = make_optimizer(*net);
  const at::Tensor inputs = at::randn({kSamples, 1024});
  const at::Tensor targets = at::randn({kSamples, 1024});
  for (auto _ : state) {
    clear_gradients(*net);
    at::mse_loss(model.forward(inputs), targets).backward();
    optimizer->step(0.01);
  }
  report_memory(state, *memory);
  const auto steps = static_cast<double>(state.iterations());
  state.counters["star_ms"] = 1e3 * model.star_seconds() / steps;
  for (size_t device = 0; device < std::min<size_t>(devices, 2); ++device) {
    const auto& traffic = model.traffic()[device];
    report_traffic(
        state, device == 0 ? "dev0" : "other",
        static_cast<double>(traffic.model_in + traffic.batch_in) / steps,
        static_cast<double>(traffic.model_out + traffic.batch_out) / steps);
  }
}

// What one rank sends, and receives, of a tensor of `bytes` in a ring.
double ring_bytes(int64_t ranks, int64_t bytes) {
  return 2 * static_cast<double>(ranks - 1) * static_cast<double>(bytes) /
         static_cast<double>(ranks);
}

// So far.
int64_t reduced_bytes(const comm::Group& group) {
  int64_t bytes = 0;
  for (const auto& verb : group.stats()) {
    if (verb.verb == "all_reduce") bytes += verb.bytes;
  }
  return bytes;
}

void distributed_rank(benchmark::State& state, comm::Communicator& ranks,
                      const std::shared_ptr<DeviceMemory>& memory) {
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
  const auto net = std::make_shared<Net>(ranks.rank());
  current_device = ranks.rank();
  DistributedDataParallel model(net, ranks.world());
  const auto optimizer = make_optimizer(*net);
  const int64_t own = kSamples / ranks.world_size();
  const at::Tensor inputs = at::randn({own, 1024});
  const at::Tensor targets = at::randn({own, 1024});
  const auto step = [&] {
    model.backward(at::mse_loss(model.forward(inputs), targets));
    optimizer->step(0.01);
  };
  step();  // the first one settles the order of the buckets
  const int64_t reduced = reduced_bytes(ranks.world());
  ranks.world().barrier();
  if (ranks.rank() > 0) {
    for (auto i = state.max_iterations; i > 0; --i) step();
    return;
  }
  for (auto _ : state) step();
  const double moved = ring_bytes(ranks.world_size(), reduced);
  report_traffic(state, "dev0", moved, moved);
  if (ranks.world_size() > 1) report_traffic(state, "other", moved, moved);
}

void distributed(benchmark::State& state) {
  auto memory = std::make_shared<DeviceMemory>();
  comm::run_threads(state.range(0), "shm", [&](comm::Communicator& ranks) {
    at::set_num_threads(1);
    distributed_rank(state, ranks, memory);
  });
  report_memory(state, *memory);
}

void degrees(benchmark::internal::Benchmark* bench) {
  bench->ArgName("devices")->UseRealTime()->Unit(benchmark::kMillisecond);
  for (const int64_t devices : {1, 2, 4}) bench->Arg(devices);
}

BENCHMARK(data_parallel)->Apply(degrees);
BENCHMARK(distributed)->Apply(degrees);

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
