// A layer of experts of a model's own shape, forward and backward, alone:
// bench/moe_bench.py's program.
//
// Usage: moe_layer mixtral|deepseek_v3 TOKENS WIDTH HIDDEN EXPERTS TOP_K
//        fp32|bf16 TIMES. Prints, as JSON, the seconds of each time. Gradients
//        of weights are added where they lie, as in a run.
#include <ATen/ATen.h>

#include <chrono>
#include <iostream>
#include <string>

#include "tessera/core/error.h"
#include "tessera/core/kept_memory.h"
#include "tessera/nn/moe.h"

namespace nn = tessera::nn;

namespace {

nn::MoeOptions options_of(const std::string& kind, int64_t width,
                          int64_t hidden, int64_t experts, int64_t top_k) {
  nn::MoeOptions options{.router = {.experts = experts, .top_k = top_k},
                         .expert = {.width = width, .hidden = hidden}};
  if (kind == "mixtral") return options;
  options.router.score = nn::GateScore::kSigmoid;
  options.router.scale = 2.5;
  options.router.groups = 4;
  options.router.top_groups = 2;
  options.shared_width = hidden;
  options.has_bias = true;
  return options;
}

void run(const std::vector<std::string>& words) {
  TS_CHECK(words.size() == 8, "moe_layer: see its source for the arguments.");
  const auto number = [&](size_t i) { return int64_t{std::stoll(words[i])}; };
  const auto type = words[6] == "bf16" ? at::kBFloat16 : at::kFloat;
  nn::Moe layer(
      options_of(words[0], number(2), number(3), number(4), number(5)));
  nn::materialise(layer, {.seed = 1, .dtype = type});
  for (at::Tensor& each : layer.parameters()) {
    each.mutable_grad() = at::zeros_like(each);
  }
  const at::Tensor dy = at::randn({1, number(1), number(2)}, type);
  std::cout << "[";
  for (int64_t time = 0; time < number(7); ++time) {
    // Others each time: experts have other numbers of rows, as in training.
    const at::Tensor x = at::randn_like(dy).requires_grad_();
    const auto begin = std::chrono::steady_clock::now();
    layer.forward(x).backward(dy);
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begin;
    std::cout << (time > 0 ? ", " : "") << took.count();
  }
  std::cout << "]\n";
}

}  // namespace

int main(int argc, char** argv) {
  tessera::keep_freed_memory();
  run({argv + 1, argv + argc});
}
