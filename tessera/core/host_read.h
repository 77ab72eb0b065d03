// Where the host reads what a device computed.
//
// A read waits for the device and for all that was put there before: whoever
// needs several numbers asks for them at once. A step reads once, behind its
// norm (engine/model_actor.h), an evaluation once (train/evaluate.h), and a
// layer of experts the sizes of its products, where the device does not take
// them as it counted them (nn/grouped_linear.h, parallel/expert/).
// Threads: each counts its own reads.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>

namespace tessera {

// On the CPU and contiguous, as it is where it lies there so; blocks until the
// device has computed it.
at::Tensor read_on_host(const at::Tensor& tensor);

// The same in two parts: the tensor is on its way from the first on, whatever
// becomes of it; the second blocks until it is there, whatever the device does
// behind it.
class HostRead {
 public:
  explicit HostRead(const at::Tensor& tensor);
  at::Tensor wait();

 private:
  at::Tensor here_;
  std::optional<c10::Event> is_there_;  // of a GPU
};

// By this thread, so far.
int64_t host_reads();

}  // namespace tessera
