// Causal attention by our loops, also with dropout, beside LibTorch's flash
// attention, forward and backward apart: bf16 or fp32, and shapes as B/T/H/E.
//
// Use:   ./dev bench attention_bench -- --benchmark_filter=T:256
//        (--benchmark_enable_random_interleaving=true takes them by turns)
// Units: items are floating-point operations that causal attention needs: four
//        for each pair that is seen and each of E forward, ten backward.
// Clock: of the process, for all threads: others on the machine do not count.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include "tessera/nn/flash_attention.h"

namespace tessera::nn {
namespace {

at::Tensor theirs(const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& v) {
  return at::scaled_dot_product_attention(
             q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
             /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true)
      .transpose(1, 2);
}

at::Tensor own(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return flash_attention(q, k, v);
}

at::Tensor dropping(const at::Tensor& q, const at::Tensor& k,
                    const at::Tensor& v) {
  return flash_attention(q, k, v, dropout_named("attention", 0.1, {}));
}

using Attend = at::Tensor (*)(const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v);

void attend(benchmark::State& state, Attend attention, at::ScalarType type,
            bool backward) {
  const int64_t tokens = state.range(1), width = state.range(3);
  const auto random = [&] {
    return at::randn({state.range(0), tokens, state.range(2), width}).to(type);
  };
  const at::Tensor q = random(), k = random(), v = random();
  const at::Tensor gradient = random();
  for (const at::Tensor& each : {q, k, v}) each.requires_grad_(backward);
  for (auto _ : state) {
    if (backward) state.PauseTiming();
    const at::Tensor out = attention(q, k, v);
    if (!backward) continue;
    for (const at::Tensor& each : {q, k, v}) each.mutable_grad().reset();
    state.ResumeTiming();
    out.backward(gradient);
  }
  const int64_t pairs =
      state.range(0) * state.range(2) * tokens * (tokens + 1) / 2;
  state.SetItemsProcessed(state.iterations() * (backward ? 10 : 4) * pairs *
                          width);
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"B", "T", "H", "E"})
      ->Args({8, 256, 8, 64})
      ->Args({4, 1024, 12, 64})
      ->Args({1, 4096, 4, 64})
      ->Unit(benchmark::kMillisecond)
      ->MeasureProcessCPUTime();
}

#define TESSERA_ATTENTION_BENCH(name, type)                                    \
  BENCHMARK_CAPTURE(attend, name##_own_forward, own, type, /*backward=*/false) \
      ->Apply(shapes);                                                         \
  BENCHMARK_CAPTURE(attend, name##_dropping_forward, dropping, type,           \
                    /*backward=*/false)                                        \
      ->Apply(shapes);                                                         \
  BENCHMARK_CAPTURE(attend, name##_libtorch_forward, theirs, type,             \
                    /*backward=*/false)                                        \
      ->Apply(shapes);                                                         \
  BENCHMARK_CAPTURE(attend, name##_own_backward, own, type, /*backward=*/true) \
      ->Apply(shapes);                                                         \
  BENCHMARK_CAPTURE(attend, name##_dropping_backward, dropping, type,          \
                    /*backward=*/true)                                         \
      ->Apply(shapes);                                                         \
  BENCHMARK_CAPTURE(attend, name##_libtorch_backward, theirs, type,            \
                    /*backward=*/true)                                         \
      ->Apply(shapes)

TESSERA_ATTENTION_BENCH(fp32, at::kFloat);
TESSERA_ATTENTION_BENCH(bf16, at::kBFloat16);

}  // namespace
}  // namespace tessera::nn

BENCHMARK_MAIN();
