// What CUDA sources need to be compiled by the host's compiler and run there:
// blocks one after the other, a block's threads as threads. For small grids.
//
// The source is included in a namespace behind this header. Shuffles and
// __syncthreads() are meant as they are on a GPU: by all threads of a warp, or
// of the block, that have not ended.
#pragma once

#include <barrier>
#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

// The names are CUDA's.
// NOLINTBEGIN(readability-identifier-naming,bugprone-reserved-identifier)
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

namespace tessera::testing::cuda {

struct Place {
  unsigned x = 0, y = 0;
};
inline thread_local Place threadIdx, blockIdx, gridDim;

struct Block {
  explicit Block(int threads) : all(threads), exchange(threads) {
    for (int i = 0; i < threads; i += 32)
      warps.push_back(std::make_unique<std::barrier<>>(32));
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<double> exchange;  // holds a float too
};
inline Block* block = nullptr;  // that runs

inline void __syncthreads() { block->all.arrive_and_wait(); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  std::barrier<>& warp = *block->warps[threadIdx.x / 32];
  block->exchange[threadIdx.x] = value;
  warp.arrive_and_wait();
  const auto other = static_cast<T>(block->exchange[threadIdx.x ^ mask]);
  warp.arrive_and_wait();
  return other;
}

inline float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline double __longlong_as_double(long long bits) {
  return std::bit_cast<double>(bits);
}

inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

using std::exp;
using std::log;
using std::sqrt;
using std::tanh;

// threads: whole warps.
inline void launch(Place grid, int threads, const std::function<void()>& body) {
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      Block here(threads);
      block = &here;
      std::vector<std::jthread> all;
      for (int i = 0; i < threads; ++i) {
        all.emplace_back([&, i] {
          threadIdx = {static_cast<unsigned>(i)};
          blockIdx = {x, y};
          gridDim = grid;
          body();
          here.warps[i / 32]->arrive_and_drop();
          here.all.arrive_and_drop();
        });
      }
    }
  }
}

}  // namespace tessera::testing::cuda
// NOLINTEND(readability-identifier-naming,bugprone-reserved-identifier)
