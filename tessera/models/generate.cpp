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

void check(const ModelConfig& config, const std::vector<int64_t>& prompt,
           const GenerateOptions& options) {
  const int64_t max_seq = config.max_seq;
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

int64_t longest_text(const ModelConfig& config,
                     const std::vector<int64_t>& prompt,
                     const GenerateOptions& options) {
  const auto length = static_cast<int64_t>(prompt.size());
  return length + std::min(options.max_new_tokens, config.max_seq - length);
}

std::vector<int64_t> generate(const ModelConfig& config,
                              const std::vector<int64_t>& prompt,
                              const GenerateOptions& options,
                              const NextToken& next, const OnToken& on_token) {
  check(config, prompt, options);
  const int64_t count = longest_text(config, prompt, options) -
                        static_cast<int64_t>(prompt.size());
  const random::Stream stream(options.seed, "generate");
  const auto& stop = options.stop_tokens;
  const int64_t num_tokens = options.num_tokens > 0
                                 ? std::min(options.num_tokens, config.vocab)
                                 : config.vocab;
  std::vector<int64_t> tokens;
  std::vector<int64_t> ids = prompt;  // that the model has not seen yet
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = next(ids, [&](const at::Tensor& logits) {
      return draw(logits.narrow(0, 0, num_tokens), options, stream.uniform(i));
    });
    if (std::ranges::find(stop, token) != stop.end()) break;
    tokens.push_back(token);
    if (on_token && !on_token(token)) break;
    ids = {token};
  }
  return tokens;
}

std::vector<int64_t> generate(Model& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options,
                              const OnToken& on_token) {
  const at::Device device = nn::parameters_of(model)[0].tensor.device();
  Cache cache = model.make_cache(longest_text(model.config(), prompt, options));
  return generate(
      model.config(), prompt, options,
      [&](const std::vector<int64_t>& ids, const Draw& draw) {
        const at::Tensor row = at::tensor(ids, at::kLong).unsqueeze(0);
        return draw(model.forward_cached(row.to(device), cache)[0]);
      },
      on_token);
}

}  // namespace tessera::models
