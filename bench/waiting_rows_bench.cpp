// A weight's gradient of several small micro-batches: a product of each, beside
// one of all of them with the copies that it takes (nn/waiting_rows.h).
//
// Usage: waiting_rows_bench [--benchmark_...]; OMP_NUM_THREADS says how many
//        threads multiply.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include <vector>

#include "tessera/core/kept_memory.h"
#include "tessera/nn/matmul.h"
#include "tessera/nn/waiting_rows.h"

namespace nn = tessera::nn;

namespace {

constexpr int64_t kBatches = 8;

// Arguments: rows of a micro-batch, in, out, whether they are bf16.
void gradients_of(benchmark::State& state, bool wait) {
  const int64_t rows = state.range(0), in = state.range(1),
                out = state.range(2);
  const auto type = state.range(3) != 0 ? at::kBFloat16 : at::kFloat;
  std::vector<at::Tensor> xs, dys;
  for (int64_t i = 0; i < kBatches; ++i) {
    xs.push_back(at::randn({rows, in}, type));
    dys.push_back(at::randn({rows, out}, type));
  }
  const at::Tensor gradient = at::zeros({out, in});
  // What lies between two gradients of a weight in a step: the other weights.
  const at::Tensor others = at::zeros({int64_t{8} << 20});
  for (const auto each : state) {
    nn::WaitingRows waiting(wait ? kBatches : 1);
    for (int64_t i = 0; i < kBatches; ++i) {
      state.PauseTiming();
      others.add_(1);
      xs[i].neg_();
      dys[i].neg_();
      state.ResumeTiming();
      if (const auto now = waiting.add(dys[i], xs[i])) {
        nn::gradient_into(gradient, now->dy, now->x, /*adds=*/true);
      }
    }
  }
  state.counters["GFLOP/s"] = benchmark::Counter(
      static_cast<double>(2 * kBatches * rows * in * out) * 1e-9,
      benchmark::Counter::kIsIterationInvariantRate);
}

void OneByOne(benchmark::State& state) { gradients_of(state, false); }
void Together(benchmark::State& state) { gradients_of(state, true); }

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "in", "out", "bf16"})->UseRealTime();
  for (const int64_t bf16 : {0, 1}) {
    for (const int64_t rows : {16, 64, 128}) {
      bench->Args({rows, 512, 512, bf16});
      bench->Args({rows, 512, 1408, bf16});
      bench->Args({rows, 3072, 768, bf16});
      bench->Args({rows, 512, 8192, bf16});
    }
  }
}

BENCHMARK(OneByOne)->Apply(sizes);
BENCHMARK(Together)->Apply(sizes);

}  // namespace

int main(int argc, char** argv) {
  tessera::keep_freed_memory();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
