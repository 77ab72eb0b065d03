#include "tessera/models/sampling.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "tessera/core/error.h"

namespace tessera::models {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

void penalise(const at::Tensor& scores, std::span<const int64_t> seen,
              double penalty) {
  double* values = scores.mutable_data_ptr<double>();
  std::vector<int64_t> ids(seen.begin(), seen.end());
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const int64_t id : ids) {
    if (id < 0 || id >= scores.numel()) continue;
    values[id] = values[id] < 0 ? values[id] * penalty : values[id] / penalty;
  }
}

// Those that tie with the k-th stay as well.
void keep_top_k(at::Tensor& scores, int64_t k) {
  const auto best = std::get<0>(scores.topk(std::min(k, scores.numel())));
  scores.masked_fill_(scores < best.min(), kNever);
}

void keep_top_p(at::Tensor& scores, double p) {
  const auto [sorted, order] = scores.sort(/*stable=*/true, 0, false);
  const at::Tensor unlikely = sorted.softmax(0).cumsum(0) <= 1 - p;
  unlikely[-1] = false;
  scores.masked_fill_(at::zeros_like(unlikely).scatter(0, order, unlikely),
                      kNever);
}

void keep_min_p(at::Tensor& scores, double share) {
  const at::Tensor p = scores.softmax(0);
  scores.masked_fill_(p < p.max() * share, kNever);
}

}  // namespace

at::Tensor sampling_scores(const at::Tensor& logits,
                           std::span<const int64_t> seen,
                           const SamplingOptions& options) {
  at::Tensor scores = logits.detach().to(at::kCPU, at::kDouble).clone();
  TS_CHECK(at::isfinite(scores).all().item<bool>(),
           "generate: the model's logits are no numbers (NaN or infinite): its "
           "weights or its configuration are no sound model.");
  if (options.repetition_penalty != 1.0) {
    penalise(scores, seen, options.repetition_penalty);
  }
  if (options.temperature == 0.0) return scores;
  scores.div_(options.temperature);
  if (options.top_k > 0) keep_top_k(scores, options.top_k);
  if (options.top_p < 1.0) keep_top_p(scores, options.top_p);
  if (options.min_p > 0.0) keep_min_p(scores, options.min_p);
  return scores;
}

int64_t draw_token(const at::Tensor& scores, const SamplingOptions& options,
                   double uniform) {
  if (options.temperature == 0.0) return scores.argmax().item<int64_t>();
  // From the likeliest on: a token more or less at the end changes few draws.
  const auto [p, order] = scores.softmax(0).sort(/*stable=*/true, 0, true);
  const double* values = p.const_data_ptr<double>();
  double left = uniform * p.sum().item<double>();
  int64_t place = 0;
  while (place + 1 < p.numel() && values[place + 1] > 0 &&
         left >= values[place]) {
    left -= values[place++];
  }
  return order[place].item<int64_t>();
}

void check_sampling(const SamplingOptions& options) {
  const auto check = [](bool holds, const char* what, const auto& value,
                        const char* rule) {
    TS_CHECK_CONFIG(holds, "generate: ", what, " ", value, " must be ", rule,
                    ".");
  };
  check(options.temperature >= 0.0, "temperature", options.temperature,
        "0 or more");
  check(options.top_k >= 0, "top_k", options.top_k, "0 (all) or more");
  check(options.top_p > 0.0 && options.top_p <= 1.0, "top_p", options.top_p,
        "in (0, 1]");
  check(options.min_p >= 0.0 && options.min_p <= 1.0, "min_p", options.min_p,
        "in [0, 1]");
  check(options.repetition_penalty > 0.0, "repetition_penalty",
        options.repetition_penalty, "above 0");
}

}  // namespace tessera::models
