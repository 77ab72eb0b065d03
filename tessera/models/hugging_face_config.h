// config.json of a Hugging Face folder, read and written.
//
// Reads both generations of keys (rope_theta and rope_scaling, or
// rope_parameters; torch_dtype or dtype) and writes both.
// Errors: TS_CHECK_CONFIG on what a Decoder does not do: another model type or
//         activation, rotary positions scaled otherwise than linear, llama3 or
//         yarn, a sliding window or biases that the family has not, quantised
//         weights. Each is named with its value. TS_CHECK_IO on a file that
//         cannot be read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/models/model_config.h"

namespace tessera::models {

struct HuggingFaceConfig {
  ModelConfig model;
  at::ScalarType dtype = at::kFloat;  // of the weights
  std::optional<int64_t> bos_token = {};
  std::vector<int64_t> eos_tokens = {};
};

// `folder` holds config.json.
HuggingFaceConfig read_hugging_face_config(const std::string& folder);
// The same from its text; `source` names it in messages.
HuggingFaceConfig parse_hugging_face_config(const std::string& text,
                                            const std::string& source);

std::string hugging_face_config_json(const HuggingFaceConfig& config);
std::string generation_config_json(const HuggingFaceConfig& config);

// The tokens that end a text, of a config.json or a generation_config.json;
// nullopt: it does not say.
std::optional<std::vector<int64_t>> eos_tokens_of(const std::string& text,
                                                  const std::string& source);

// Whether a config.json names the first and last tokens of `config`.
bool has_tokens_of(const std::string& text, const std::string& source,
                   const HuggingFaceConfig& config);
// A config.json of the same sizes: its own text, in which only what `config`
// has otherwise is changed: type of the weights, tokens, balance of experts,
// length of sequences and scaling of positions, dropout where the family has it
// as model.dropout says. `has_its_tokenizer`: the one that the text came with;
// of another no token is padding.
std::string updated_hugging_face_config(const std::string& text,
                                        const std::string& source,
                                        const HuggingFaceConfig& config,
                                        bool has_its_tokenizer);
// The same of a generation_config.json's tokens.
std::string updated_generation_config(const std::string& text,
                                      const std::string& source,
                                      const HuggingFaceConfig& config,
                                      bool has_its_tokenizer);

}  // namespace tessera::models
