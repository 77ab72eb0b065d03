// Where the host reads what a device computed.
//
// A read waits for the device and for all that was put there before: whoever
// needs several numbers asks for them at once. A step reads once, behind its
// norm (engine/model_actor.h), an evaluation once (train/evaluate.h), and each
// layer of experts the sizes of its products (nn/moe.h, parallel/expert/).
// Threads: each counts its own reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

// On the CPU and contiguous, as it is where it lies there so; blocks until the
// device has computed it.
at::Tensor read_on_host(const at::Tensor& tensor);

// By this thread, so far.
int64_t host_reads();

}  // namespace tessera
