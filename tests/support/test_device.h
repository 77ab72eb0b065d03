// A device for tests: its memory is out of the host's reach, as a GPU's is. Of
// LibTorch's kind HPU, which no build of it has, and whose tensors may take the
// place of the CPU's, as CUDA's may.
//
// Whoever reads or writes a device's tensor by its address ends with SIGSEGV;
// operators that get a tensor of the CPU among its own ones are refused. What
// an operator computes, the CPU's computes, on copies. Each time that the host
// waits for it, to read, is counted. Streams: one, the default.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace tessera::testing {

// Not beside a LibTorch with CUDA, which lets no other device be.
bool has_test_device();

// REQUIRES: has_test_device().
at::Device test_device();

// As if it had so many bytes, from now on; 0: as many as there are. What is
// beyond them is refused as a GPU refuses it.
void limit_test_device(int64_t bytes);

// How often this thread read something of it.
int64_t reads_of_device();

}  // namespace tessera::testing
