#include "tessera/core/device.h"

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include "tessera/core/error.h"

namespace tessera {

bool has_cuda() { return at::detail::getCUDAHooks().hasCUDART(); }

c10::DeviceType device_type_of(const std::string& name) {
  if (name != "cuda") return c10::kCPU;
  TS_CHECK_CONFIG(has_cuda(),
                  "run.device is cuda, but this program was built with "
                  "a LibTorch ",
                  TORCH_VERSION,
                  " without CUDA. Build it with "
                  "'./dev build --cuda', or set run.device to cpu.");
  TS_CHECK_REACH(num_gpus() > 0,
                 "run.device is cuda, but no GPU is found. "
                 "'nvidia-smi' says whether there is a driver, and "
                 "CUDA_VISIBLE_DEVICES may hide them all. Or set run.device to "
                 "cpu.");
  return c10::kCUDA;
}

int64_t num_gpus() {
  // Throws nothing: without a driver there are none.
  return has_cuda() ? at::detail::getCUDAHooks().getNumGPUs() : 0;
}

void take_device(c10::DeviceType type, int64_t rank_on_host) {
  if (type == c10::kCPU) return;
  const c10::impl::VirtualGuardImpl devices(type);
  devices.setDevice({type, static_cast<c10::DeviceIndex>(
                               rank_on_host % devices.deviceCount())});
}

void take_stream(c10::Device device) {
  if (device.is_cpu()) return;
  wait_for_device(device);
  const c10::impl::VirtualGuardImpl devices(device.type());
  devices.exchangeStream(devices.getStreamFromGlobalPool(device));
}

at::Tensor sent_to(const at::Tensor& tensor, c10::Device device) {
  if (!device.is_cuda() || !tensor.is_cpu()) return tensor.to(device);
  // LibTorch holds the pinned copy until it has been read.
  return tensor.pin_memory().to(device, /*dtype=*/tensor.scalar_type(),
                                /*non_blocking=*/true);
}

at::Tensor host_memory_for(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options()
                                       .device(at::kCPU)
                                       .pinned_memory(tensor.is_cuda())
                                       .requires_grad(false));
}

at::Tensor begin_to_host(const at::Tensor& tensor) {
  return host_memory_for(tensor).copy_(tensor.detach(), /*non_blocking=*/true);
}

void wait_for_device(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl devices(device.type());
  devices.synchronizeStream(devices.getStream(device));
}

c10::Event record_event(c10::Device device) {
  const c10::impl::VirtualGuardImpl devices(device.type());
  c10::Event event(device.type());
  event.record(devices.getStream(device));
  return event;
}

void SentCopies::copy(const at::Tensor& to, const at::Tensor& tensor) {
  if (!to.is_cuda() || !tensor.is_cpu()) {
    to.copy_(tensor);
    return;
  }
  constexpr size_t kMost = 2;
  if (under_way_.size() == kMost) {
    under_way_.front().synchronize();
    under_way_.pop_front();
  }
  to.copy_(tensor.pin_memory(), /*non_blocking=*/true);
  under_way_.push_back(record_event(to.device()));
}

}  // namespace tessera
