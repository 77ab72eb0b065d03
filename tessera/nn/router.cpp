#include "tessera/nn/router.h"

#include <ATen/ATen.h>

#include <limits>

#include "tessera/core/device.h"
#include "tessera/core/random.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

constexpr double kTiny = 1e-20;  // sigmoids may all be zero

// Tokens with one history, as the same word twice at a sample's begin, have
// equal scores but for rounding, which is another on every mesh.
at::Tensor without_rounding(const at::Tensor& scores) {
  const double kept = scores.scalar_type() == at::kDouble ? 0x1p30 : 0x1p14;
  const auto [mantissa, exponent] = at::frexp(scores);
  return at::ldexp((mantissa * kept).round(), exponent);
}

// -inf where a token's groups are not among its best.
at::Tensor of_best_groups(const at::Tensor& choice,
                          const RouterOptions& options) {
  const int64_t tokens = choice.size(0);
  const int64_t each = options.experts / options.groups;
  const at::Tensor groups = choice.view({tokens, options.groups, each});
  const at::Tensor two = std::get<0>(groups.topk(std::min<int64_t>(2, each)));
  const at::Tensor best = std::get<1>(two.sum(-1).topk(options.top_groups));
  const at::Tensor others =
      at::ones({tokens, options.groups}, choice.options().dtype(at::kBool))
          .scatter_(1, best, false);
  return groups
      .masked_fill(others.unsqueeze(-1),
                   -std::numeric_limits<double>::infinity())
      .view_as(choice);
}

}  // namespace

Routing route(const at::Tensor& products, const at::Tensor& bias,
              const RouterOptions& options) {
  const bool is_softmax = options.score == GateScore::kSoftmax;
  const at::ScalarType wide = wide_type(products);
  const at::Tensor scores = is_softmax ? at::softmax(products, /*dim=*/-1, wide)
                                       : products.to(wide).sigmoid();
  Routing routing;
  routing.probabilities =
      is_softmax ? scores : scores / (scores.sum(-1, /*keepdim=*/true) + kTiny);
  if (options.choice == GateChoice::kExperts) {
    routing.weights = options.scale == 1 ? scores : scores * options.scale;
    return routing;
  }
  if (!bias.defined() && options.groups == 1) {
    std::tie(routing.weights, routing.experts) =
        at::topk(scores, options.top_k);
  } else {
    at::Tensor choice = scores.detach();
    if (bias.defined()) choice = choice + bias.detach();
    if (options.groups > 1) choice = of_best_groups(choice, options);
    routing.experts = std::get<1>(at::topk(choice, options.top_k));
    routing.weights = scores.gather(-1, routing.experts);
  }
  if (options.normalize) {
    at::Tensor sum = routing.weights.sum(-1, /*keepdim=*/true);
    if (!is_softmax) sum = sum + kTiny;
    routing.weights = routing.weights / sum;
  }
  if (options.scale != 1) routing.weights = routing.weights * options.scale;
  return routing;
}

at::Tensor gate_noise(const Draw& draw, int64_t layer,
                      const Positions& positions, int64_t samples,
                      int64_t experts, const at::TensorOptions& options) {
  int64_t tokens = 0;
  for (const auto& [first, length] : positions) tokens += length;
  const at::Tensor noise =
      at::empty({samples * tokens, experts},
                options.device(at::kCPU).requires_grad(false));
  const auto fill = [&](auto* next) {
    for (int64_t b = 0; b < samples; ++b) {
      const random::Stream stream(
          draw.seed, c10::str("gate noise.", draw.step, ".", layer, ".",
                              draw.first_sample + b));
      for (const auto& [first, length] : positions) {
        stream.fill_normal(next, first * experts, length * experts, 0, 1);
        next += length * experts;
      }
    }
  };
  if (noise.scalar_type() == at::kDouble) {
    fill(noise.mutable_data_ptr<double>());
  } else {
    fill(noise.mutable_data_ptr<float>());
  }
  return sent_to(noise, options.device());
}

at::Tensor taken_tokens(const at::Tensor& scores, int64_t capacity) {
  const at::Tensor order =
      at::argsort(without_rounding(scores), /*stable=*/true, /*dim=*/1,
                  /*descending=*/true);
  return at::zeros_like(scores, at::kBool)
      .scatter_(1, order.narrow(1, 0, capacity), true);
}

at::Tensor within_capacity(const at::Tensor& choices, int64_t experts,
                           int64_t capacity) {
  const int64_t samples = choices.size(0);
  const at::Tensor sample =
      at::arange(samples, choices.options()).view({-1, 1, 1});
  const at::Tensor keys = (choices + sample * experts).flatten();
  const at::Tensor order = at::argsort(keys, /*stable=*/true, /*dim=*/0,
                                       /*descending=*/false);
  const at::Tensor counts = at::zeros({samples * experts}, keys.options())
                                .scatter_add_(0, keys, at::ones_like(keys));
  const at::Tensor begins = counts.cumsum(0) - counts;
  const at::Tensor places = at::arange(keys.numel(), choices.options()) -
                            begins.index_select(0, keys.index_select(0, order));
  return at::empty_like(keys, at::kBool)
      .scatter_(0, order, places < capacity)
      .view_as(choices);
}

int64_t capacity_of(double factor, int64_t tokens, int64_t top_k,
                    int64_t experts) {
  const double share =
      static_cast<double>(tokens * top_k) / static_cast<double>(experts);
  // 1.15 * 100 is 115, of which the product of doubles is a hair short.
  constexpr double kRounding = 8 * std::numeric_limits<double>::epsilon();
  return static_cast<int64_t>(factor * share * (1 + kRounding));
}

int64_t room_of(double factor, int64_t tokens, int64_t top_k, int64_t experts) {
  const int64_t capacity = capacity_of(factor, tokens, top_k, experts);
  return std::min(tokens, std::max<int64_t>(1, capacity));
}

}  // namespace tessera::nn
