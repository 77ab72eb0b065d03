#include "tessera/monitor/throughput.h"

namespace tessera::monitor {
Throughput throughput(int64_t tokens, double seconds, int64_t world_size,
                      double flops_per_token,
                      std::optional<double> peak_flops) {
  Throughput result;
  if (seconds <= 0) return result;
  result.tokens_per_s = static_cast<double>(tokens) / seconds;
  if (flops_per_token <= 0) return result;
  const double flops =
      result.tokens_per_s * flops_per_token / static_cast<double>(world_size);
  result.tflops = flops / 1e12;
  if (peak_flops && *peak_flops > 0) result.mfu = flops / *peak_flops;
  return result;
}

}  // namespace tessera::monitor
