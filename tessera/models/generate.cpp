#include "tessera/models/generate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "tessera/core/error.h"
#include "tessera/core/random.h"

namespace tessera::models {
namespace {

// How many of the likeliest tokens may be drawn. `p` is in descending order.
int64_t num_kept(const std::vector<double>& p, const GenerateOptions& options) {
  auto kept = static_cast<int64_t>(p.size());
  if (options.top_k > 0) kept = std::min(kept, options.top_k);
  double reached = 0.0;
  for (int64_t i = 0; i < kept; ++i) {
    reached += p[i];
    if (reached >= options.top_p) return i + 1;
  }
  return kept;
}

// `uniform` in [0, 1) picks a token of the distribution of `logits` (V).
int64_t draw(const at::Tensor& logits, const GenerateOptions& options,
             double uniform) {
  if (options.temperature == 0.0) return logits.argmax().item<int64_t>();
  const at::Tensor scaled =
      logits.to(at::kCPU, at::kDouble) / options.temperature;
  const auto [sorted, order] = at::softmax(scaled, 0).sort(0, true);
  const double* values = sorted.const_data_ptr<double>();
  const std::vector<double> p(values, values + sorted.numel());
  const int64_t kept = num_kept(p, options);
  double left = uniform * std::accumulate(p.begin(), p.begin() + kept, 0.0);
  int64_t place = 0;
  while (place + 1 < kept && left >= p[place]) left -= p[place++];
  return order[place].item<int64_t>();
}

void check(const Model& model, const std::vector<int64_t>& prompt,
           const GenerateOptions& options) {
  const int64_t max_seq = model.config().max_seq;
  const auto length = static_cast<int64_t>(prompt.size());
  TS_CHECK_CONFIG(length > 0, "generate: the prompt has no token.");
  TS_CHECK_CONFIG(length < max_seq, "generate: the prompt has ", length,
                  " tokens and leaves no room in model.max_seq ", max_seq, ".");
  TS_CHECK_CONFIG(options.temperature >= 0.0, "generate: temperature ",
                  options.temperature, " must be 0 or more.");
  TS_CHECK_CONFIG(options.top_p > 0.0 && options.top_p <= 1.0,
                  "generate: top_p ", options.top_p, " must be in (0, 1].");
  TS_CHECK_CONFIG(options.top_k >= 0, "generate: top_k ", options.top_k,
                  " must be 0 (all) or more.");
}

}  // namespace

std::vector<int64_t> generate(Model& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options,
                              const OnToken& on_token) {
  check(model, prompt, options);
  const at::Device device = nn::parameters_of(model)[0].tensor.device();
  const auto length = static_cast<int64_t>(prompt.size());
  const int64_t count =
      std::min(options.max_new_tokens, model.config().max_seq - length);
  Cache cache = model.make_cache(length + count);
  const random::Stream stream(options.seed, "generate");
  const auto& stop = options.stop_tokens;
  const int64_t vocab = model.config().vocab;
  const int64_t num_tokens =
      options.num_tokens > 0 ? std::min(options.num_tokens, vocab) : vocab;
  std::vector<int64_t> tokens;
  at::Tensor next = at::tensor(prompt, at::kLong).unsqueeze(0).to(device);
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor logits =
        model.forward_cached(next, cache)[0].narrow(0, 0, num_tokens);
    const int64_t token = draw(logits, options, stream.uniform(i));
    if (std::ranges::find(stop, token) != stop.end()) break;
    tokens.push_back(token);
    if (on_token && !on_token(token)) break;
    next = at::full({1, 1}, token, at::TensorOptions(at::kLong).device(device));
  }
  return tokens;
}

}  // namespace tessera::models
