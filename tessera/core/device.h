// The devices that ranks compute with.
//
// Index:  each rank has one device of its host: the GPUs in turn, so that ranks
//         share one where there are fewer. It is the thread's current one, on
//         which tensors are made whose device names no index.
// Errors: TS_CHECK_CONFIG where this LibTorch cannot, TS_CHECK_REACH where it
//         finds no GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <string>

namespace tessera {

// What "cpu" or "cuda" names.
c10::DeviceType device_type_of(const std::string& name);

// Whether this LibTorch has CUDA, with or without a GPU.
bool has_cuda();

// Those that LibTorch finds; 0 where it has no CUDA.
int64_t num_gpus();

// This thread's device is that of such a rank of its host.
void take_device(c10::DeviceType type, int64_t rank_on_host);

// What this thread asks of the device from here on goes on a stream of its own,
// behind what it has asked so far. Of the CPU: nothing.
void take_stream(c10::Device device);

// Of a tensor of the host, on that device; a GPU's stream gets it when it is
// that far, and the host waits for nothing. Of another device: as to().
at::Tensor sent_to(const at::Tensor& tensor, c10::Device device);

// Of a device's tensor, contiguous memory of the host for as much, not
// initialised: a GPU copies there and from there by itself.
at::Tensor host_memory_for(const at::Tensor& tensor);
// The same with the tensor's numbers, once wait_for_device() was called.
at::Tensor begin_to_host(const at::Tensor& tensor);

// Until the device has done what this thread asked of it. Of the CPU: at once.
void wait_for_device(c10::Device device);
// Behind what this thread asked of the device, which is none of the CPU.
c10::Event record_event(c10::Device device);

// What goes from the host to a GPU, so much that its pinned copies are to be
// few: two are there at most, and who sends a third waits for the first.
class SentCopies {
 public:
  // Into memory that is there, as sent_to() has it.
  void copy(const at::Tensor& to, const at::Tensor& tensor);

 private:
  std::deque<c10::Event> under_way_;
};

}  // namespace tessera
