// How fast a step was, and how that compares with what this machine can do.
//
// Units:  FLOP/s and FLOPs a token count a multiplication and an addition as
//         two; tflops and mfu are of one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace tessera::monitor {

// c = a b, as the model multiplies.
using Product = std::function<void(const at::Tensor& c, const at::Tensor& a,
                                   const at::Tensor& b)>;

// The best rate of a square matrix product on this process's threads, measured
// until it gets no better, once for each dtype and number of threads: up to 0.3
// s, in which nothing else should compute here. Nothing for a dtype that has no
// product.
std::optional<double> measured_peak_flops(c10::ScalarType dtype,
                                          const Product& product);

struct Throughput {
  double tokens_per_s = 0;  // of the world
  std::optional<double> tflops;
  std::optional<double> mfu;  // 0..1
};

// `flops_per_token`: forward and backward; 0: unknown. `peak_flops`: of a rank.
Throughput throughput(int64_t tokens, double seconds, int64_t world_size,
                      double flops_per_token, std::optional<double> peak_flops);

}  // namespace tessera::monitor
