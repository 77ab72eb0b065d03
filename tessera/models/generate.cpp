#include "tessera/models/generate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "tessera/core/error.h"
#include "tessera/core/random.h"

namespace tessera::models {
namespace {

// Each sample of one seed has draws of its own.
random::Stream draws(const GenerateOptions& options) {
  const std::string name = "generate";
  return {options.seed, options.sample == 0
                            ? name
                            : name + "." + std::to_string(options.sample)};
}

}  // namespace

void check_writes(const ModelConfig& config) {
  TS_CHECK_CONFIG(
      !config.moe.experts_choose(),
      "generate: with model.moe.choice experts which tokens an expert takes "
      "depends on later ones, which a text that is being written has not yet. "
      "Train with model.moe.choice tokens to write.");
}

void check_generation(const ModelConfig& config,
                      const std::vector<int64_t>& prompt,
                      const GenerateOptions& options) {
  check_writes(config);
  const int64_t max_seq = config.max_seq;
  const auto length = static_cast<int64_t>(prompt.size());
  TS_CHECK_CONFIG(length > 0, "generate: the prompt has no token.");
  TS_CHECK_CONFIG(length < max_seq, "generate: the prompt has ", length,
                  " tokens and leaves no room in model.max_seq ", max_seq, ".");
  check_sampling(options.sampling);
}

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
  check_generation(config, prompt, options);
  const int64_t count = longest_text(config, prompt, options) -
                        static_cast<int64_t>(prompt.size());
  const random::Stream stream = draws(options);
  const auto& stop = options.stop_tokens;
  const int64_t num_tokens = options.num_tokens > 0
                                 ? std::min(options.num_tokens, config.vocab)
                                 : config.vocab;
  std::vector<int64_t> tokens;
  std::vector<int64_t> ids = prompt;  // that the model has not seen yet
  std::vector<int64_t> text = prompt;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = next(ids, [&](const at::Tensor& logits) {
      const at::Tensor scores = sampling_scores(logits.narrow(0, 0, num_tokens),
                                                text, options.sampling);
      return draw_token(scores, options.sampling, stream.uniform(i));
    });
    if (std::ranges::find(stop, token) != stop.end()) break;
    tokens.push_back(token);
    text.push_back(token);
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
