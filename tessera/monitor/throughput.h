// How fast a step was, and how that compares with what this machine can do.
//
// Units:  FLOP/s and FLOPs a token count a multiplication and an addition as
//         two; tflops and mfu are of one rank.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::monitor {

struct Throughput {
  double tokens_per_s = 0;  // of the world
  std::optional<double> tflops;
  std::optional<double> mfu;  // 0..1
};

// `flops_per_token`: forward and backward; 0: unknown. `peak_flops`: of a rank.
Throughput throughput(int64_t tokens, double seconds, int64_t world_size,
                      double flops_per_token, std::optional<double> peak_flops);

}  // namespace tessera::monitor
