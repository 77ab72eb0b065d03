#include "tessera/core/device_graph.h"

#include <c10/util/Exception.h>

#ifdef TESSERA_HAS_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace tessera {

#ifdef TESSERA_HAS_CUDA

struct DeviceGraph::Recorded {
  at::cuda::CUDAGraph graph;
};

bool DeviceGraph::can_record(c10::Device device) { return device.is_cuda(); }

// Other threads go on meanwhile, as those that read data: only this one's calls
// are watched.
void DeviceGraph::record(const std::function<void()>& work) {
  // What eager steps have left there is the graph's to take.
  c10::cuda::CUDACachingAllocator::emptyCache();
  auto recorded = std::make_unique<Recorded>();
  recorded->graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  try {
    work();
  } catch (...) {
    try {
      recorded->graph.capture_end();
    } catch (const c10::Error&) {  // of what was in the way: the first is told
    }
    throw;
  }
  recorded->graph.capture_end();
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
