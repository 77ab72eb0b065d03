// A small model of each family, for tests of the models' room.
#pragma once

#include <memory>
#include <string>

#include "tessera/models/decoder.h"

namespace tessera::models {

inline ModelConfig small_model(const std::string& family) {
  ModelConfig config;
  config.family = family;
  config.layers = 2;
  config.hidden = 12;
  config.heads = 3;
  config.kv_heads = family == "gpt2" || family == "deepseek_v3" ? 3 : 1;
  config.ffn = 20;
  config.vocab = 31;
  config.max_seq = 16;
  config.tie_embeddings = family != "llama";
  config.window = family == "mistral" ? 3 : 0;
  if (family == "gemma3_text") {
    config.query_pre_attn_scalar = 6;
    config.window = 3;
    config.window_every = 2;
    config.rope_theta_local = 50.0;
  }
  config.complete();
  return config;
}

inline std::shared_ptr<Decoder> small_decoder(
    const std::string& family, double dropout = 0,
    at::ScalarType type = at::kDouble) {
  ModelConfig config = small_model(family);
  config.dropout = dropout;
  auto decoder = std::make_shared<Decoder>(config);
  nn::materialise(*decoder, {.seed = 5, .dtype = type});
  // Far from the start, where all logits are nearly equal.
  const at::NoGradGuard no_grad;
  for (auto& parameter : nn::parameters_of(*decoder)) {
    parameter.tensor.mul_(parameter.tensor.dim() == 2 ? 20.0 : 1.0);
  }
  return decoder;
}

}  // namespace tessera::models
