#include "tessera/core/device_graph.h"

#include <c10/util/Exception.h>

#include <utility>

#ifdef TESSERA_HAS_CUDA
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace tessera {

#ifdef TESSERA_HAS_CUDA

struct DeviceGraph::Recorded {
  std::unique_ptr<at::cuda::CUDAGraph> graph;
};

namespace {

// Of several errors the first is told.
void attempt(const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::Error&) {  // it was done, or cannot be
  }
}

// What was in the way of a recording is often in the way of its end too. Then
// nobody else closes its pools: the allocators would keep for good what lies in
// them, and give back nothing else that is free.
void give_up(std::unique_ptr<at::cuda::CUDAGraph> graph,
             c10::MempoolId_t pool) {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  const auto device = c10::cuda::current_device();
  attempt([&] { graph->capture_end(); });
  attempt([&] { allocator::endAllocateToPool(device, pool); });
  attempt([&] {  // pinned memory; released already where it was ended
    at::HostAllocator& host = *at::getHostAllocator(at::kCUDA);
    host.end_allocate_to_pool(pool);
    host.release_pool(pool);
  });
  attempt([&] { graph.reset(); });
  attempt([&] {
    if (allocator::getPoolUseCount(device, pool) > 0) {
      allocator::releasePool(device, pool);
    }
  });
}

}  // namespace

bool DeviceGraph::can_record(c10::Device device) { return device.is_cuda(); }

// Other threads go on meanwhile, as those that read data: only this one's calls
// are watched.
void DeviceGraph::record(const std::function<void()>& work) {
  // What eager steps have left there is the graph's to take.
  c10::cuda::CUDACachingAllocator::emptyCache();
  auto graph = std::make_unique<at::cuda::CUDAGraph>();
  const c10::MempoolId_t pool = at::cuda::graph_pool_handle();
  try {
    graph->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    work();
    graph->capture_end();
  } catch (...) {
    give_up(std::move(graph), pool);
    throw;
  }
  recorded_ = std::make_unique<Recorded>(std::move(graph));
}

void DeviceGraph::repeat() { recorded_->graph->replay(); }

#else

struct DeviceGraph::Recorded {};

bool DeviceGraph::can_record(c10::Device /*device*/) { return false; }

void DeviceGraph::record(const std::function<void()>& /*work*/) {
  TORCH_INTERNAL_ASSERT(false, "this LibTorch has no graphs");
}

void DeviceGraph::repeat() {
  TORCH_INTERNAL_ASSERT(false, "nothing was recorded");
}

#endif

DeviceGraph::DeviceGraph() = default;
DeviceGraph::~DeviceGraph() = default;

}  // namespace tessera
