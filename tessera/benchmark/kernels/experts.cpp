// A layer of experts: products of each one's rows, grouped, beside a loop over
// experts in plain LibTorch.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>

#include "tessera/benchmark/kernels/contest.h"
#include "tessera/nn/moe.h"

namespace tessera::benchmark::kernels {
namespace {

struct Shape {
  int64_t tokens, width, hidden, experts, top_k;
};
constexpr Shape kSmall{1024, 256, 128, 32, 2};  // many experts, few rows
constexpr Shape kLarge{2048, 512, 1408, 8, 2};  // as Mixtral's, smaller

// Takes each expert's rows, and adds what it makes of them to their tokens. The
// gate is in fp32 at least, as ours: else it may choose others.
at::Tensor by_loop(const Pair::Inputs& in, int64_t top_k) {
  const at::Tensor& x = in[0];
  const at::ScalarType type =
      x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor p = at::softmax(at::linear(x.to(type), in[1].to(type)), -1);
  auto [weights, chosen] = at::topk(p, top_k);
  weights = (weights / weights.sum(-1, /*keepdim=*/true)).to(x.scalar_type());
  at::Tensor y = at::zeros_like(x);
  for (int64_t e = 0; e < in[1].size(0); ++e) {
    const auto places = at::where(chosen == e);
    const at::Tensor rows = x.index_select(0, places[0]);
    const at::Tensor hidden =
        at::silu(at::linear(rows, in[2][e])) * at::linear(rows, in[3][e]);
    const at::Tensor weight = weights.index({places[0], places[1]});
    y = y.index_add(0, places[0],
                    at::linear(hidden, in[4][e]) * weight.unsqueeze(1));
  }
  return y;
}

Pair pair_of(const Shape& shape, at::ScalarType dtype) {
  const auto moe = std::make_shared<nn::Moe>(
      nn::MoeOptions{.router = {.experts = shape.experts, .top_k = shape.top_k},
                     .expert = {.width = shape.width, .hidden = shape.hidden}});
  nn::materialise(*moe, {.seed = 1, .dtype = dtype});
  Pair pair;
  pair.inputs = {leaf({shape.tokens, shape.width}, dtype, 2)};
  for (const at::Tensor& each : moe->parameters()) pair.inputs.push_back(each);
  pair.ours = [moe](const Pair::Inputs& in) {
    return moe->forward(in[0].unsqueeze(0)).squeeze(0);
  };
  pair.libtorch = [top_k = shape.top_k](const Pair::Inputs& in) {
    return by_loop(in, top_k);
  };
  return pair;
}

Contest contest_of(const char* kernel, const Shape& shape, at::ScalarType dtype,
                   double products) {
  const double rows = static_cast<double>(shape.tokens * shape.top_k);
  return {.kernel = kernel,
          .dtype = dtype,
          .shape = c10::str(shape.tokens, "x", shape.width, ", ", shape.experts,
                            " of ", shape.hidden, ", top ", shape.top_k),
          .flops = products * 2 * rows *
                   static_cast<double>(shape.width * shape.hidden),
          .most_ulps = 64};
}

// The reference is the loop's, in fp64: the gate's choices are the same.
std::function<std::vector<Reference>()> of_loop(const Pair& pair, int64_t top_k,
                                                const at::Tensor& dy) {
  return [inputs = pair.inputs, top_k, dy] {
    Pair::Inputs in;
    for (const auto& each : inputs) in.push_back(wide(each).requires_grad_());
    const at::Tensor y = by_loop(in, top_k);
    std::vector<at::Tensor> found = {y.detach()};
    if (dy.defined()) found = torch::autograd::grad({y}, in, {wide(dy)});
    std::vector<Reference> all;
    for (const auto& each : found) {
      all.push_back({each, each.abs().max().expand_as(each)});
    }
    return all;
  };
}

MakeContest forward_of(const char* kernel, const Shape& shape) {
  return [=](at::ScalarType dtype) {
    const Pair pair = pair_of(shape, dtype);
    Contest contest =
        pair.forward(contest_of(kernel, shape, dtype, /*products=*/3));
    contest.wanted = of_loop(pair, shape.top_k, {});
    return contest;
  };
}

MakeContest backward_of(const char* kernel, const Shape& shape) {
  return [=](at::ScalarType dtype) {
    const Pair pair = pair_of(shape, dtype);
    const at::Tensor dy = random_tensor({shape.tokens, shape.width}, dtype, 3);
    Contest contest =
        pair.backward(contest_of(kernel, shape, dtype, /*products=*/6), dy);
    contest.wanted = of_loop(pair, shape.top_k, dy);
    return contest;
  };
}

}  // namespace

std::vector<MakeContest> expert_contests() {
  return {forward_of("small_experts", kSmall),
          backward_of("small_experts_backward", kSmall),
          forward_of("experts", kLarge),
          backward_of("experts_backward", kLarge)};
}

}  // namespace tessera::benchmark::kernels
