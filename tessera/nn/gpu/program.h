// The loops of loops.cu on GPUs: compiled by NVRTC at the first use of each
// type, in 5 s or so, and kept in files for the next time.
//
// Libraries: NVRTC's and the driver's are found when they are needed; nothing
//            is linked, so that one program serves machines with and without.
// Files:     $XDG_CACHE_HOME/tessera, else ~/.cache/tessera, by what they are
//            made of; where none can be written, none is, and one that
//            cannot be read is made anew.
// Threads:   any may ask; the first one compiles.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>

namespace tessera::nn::gpu {

// Machine code for "sm_90", of the type that has so many bits; bf16 has 16.
// Errors: TS_CHECK, without NVRTC, or with its words.
std::string compile(const std::string& architecture, int bits);

// The first number of the compute capability of x's GPU: 9 is Hopper's. 0
// where it does not run() x's loops.
int capability_of(const at::Tensor& x);

// The least compute capability of the GPUs here, as 89 for 8.9. REQUIRES:
// num_gpus() > 0 (core/device.h). Errors: TS_CHECK, of the driver.
int least_capability();

// Whether x's device has the loops, for its type. Where they cannot be made it
// is said once for each device and size of type, and operators of LibTorch go
// on in their place.
bool runs(const at::Tensor& x);

// Threads of a block, as loops.cu is compiled; of a warp.
inline constexpr int64_t kThreads = 256, kWarp = 32;

// Blocks that go over so many elements: some for each multiprocessor, the same
// number on every GPU.
int64_t blocks_for(int64_t elements);

// Puts a loop for x's type on the current stream of its device. `arguments`:
// the address of each. REQUIRES: runs(x).
void launch(const std::string& loop, const at::Tensor& x, int64_t blocks,
            void** arguments);

template <typename... Arguments>
void launch(const std::string& loop, const at::Tensor& x, int64_t blocks,
            Arguments... given) {
  std::array<void*, sizeof...(given)> addresses{static_cast<void*>(&given)...};
  launch(loop, x, blocks, addresses.data());
}

}  // namespace tessera::nn::gpu
