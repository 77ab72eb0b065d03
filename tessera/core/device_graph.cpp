#include "tessera/core/device_graph.h"

#include <c10/util/Exception.h>

#ifdef TESSERA_HAS_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace tessera {

#ifdef TESSERA_HAS_CUDA

struct DeviceGraph::Recorded {
  at::cuda::CUDAGraph graph;
};

namespace {

// What was in the way of a recording is often in the way of its end too. Then
// nobody else closes the pool, and the allocator would keep for good what lies
// in it, and give back nothing else that is free.
void give_up(at::cuda::CUDAGraph& graph, c10::MempoolId_t pool) {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  try {
    graph.capture_end();
  } catch (const c10::Error&) {
    try {
      const auto device = c10::cuda::current_device();
      allocator::endAllocateToPool(device, pool);
      allocator::releasePool(device, pool);
    } catch (const c10::Error&) {  // it was closed: the first error is told
    }
  }
}

}  // namespace

bool DeviceGraph::can_record(c10::Device device) { return device.is_cuda(); }

// Other threads go on meanwhile, as those that read data: only this one's calls
// are watched.
void DeviceGraph::record(const std::function<void()>& work) {
  // What eager steps have left there is the graph's to take.
  c10::cuda::CUDACachingAllocator::emptyCache();
  auto recorded = std::make_unique<Recorded>();
  const c10::MempoolId_t pool = at::cuda::graph_pool_handle();
  recorded->graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  try {
    work();
    recorded->graph.capture_end();
  } catch (...) {
    give_up(recorded->graph, pool);
    throw;
  }
  recorded_ = std::move(recorded);
}

void DeviceGraph::repeat() { recorded_->graph.replay(); }

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
