#include "tessera/models/hugging_face_names.h"

#include <ATen/ATen.h>

#include <cctype>
#include <map>
#include <span>
#include <sstream>
#include <string_view>

#include "tessera/core/error.h"

namespace tessera::models {
namespace {

// A "*" stands for a number, first the layer's, then the expert's; ".weight"
// and ".bias" are kept.
struct Name {
  std::string_view ours;
  std::string_view theirs;
  bool transposed = false;
  int64_t part = 0;
  int64_t parts = 1;
};

constexpr Name kGpt2[] = {
    {"embed.tokens", "transformer.wte"},
    {"embed.positions", "transformer.wpe"},
    {"blocks.*.attention_norm", "transformer.h.*.ln_1"},
    {"blocks.*.attention.q", "transformer.h.*.attn.c_attn", true, 0, 3},
    {"blocks.*.attention.k", "transformer.h.*.attn.c_attn", true, 1, 3},
    {"blocks.*.attention.v", "transformer.h.*.attn.c_attn", true, 2, 3},
    {"blocks.*.attention.o", "transformer.h.*.attn.c_proj", true},
    {"blocks.*.mlp_norm", "transformer.h.*.ln_2"},
    {"blocks.*.mlp.up", "transformer.h.*.mlp.c_fc", true},
    {"blocks.*.mlp.down", "transformer.h.*.mlp.c_proj", true},
    {"final_norm", "transformer.ln_f"},
    {"head", "lm_head"},
};

// Also of Qwen2, Qwen3 and Mixtral.
constexpr Name kLlama[] = {
    {"embed.tokens", "model.embed_tokens"},
    {"blocks.*.attention_norm", "model.layers.*.input_layernorm"},
    {"blocks.*.attention.q", "model.layers.*.self_attn.q_proj"},
    {"blocks.*.attention.k", "model.layers.*.self_attn.k_proj"},
    {"blocks.*.attention.v", "model.layers.*.self_attn.v_proj"},
    {"blocks.*.attention.o", "model.layers.*.self_attn.o_proj"},
    {"blocks.*.attention.q_norm", "model.layers.*.self_attn.q_norm"},
    {"blocks.*.attention.k_norm", "model.layers.*.self_attn.k_norm"},
    {"blocks.*.mlp_norm", "model.layers.*.post_attention_layernorm"},
    {"blocks.*.mlp.gate", "model.layers.*.mlp.gate_proj"},
    {"blocks.*.mlp.up", "model.layers.*.mlp.up_proj"},
    {"blocks.*.mlp.down", "model.layers.*.mlp.down_proj"},
    {"blocks.*.moe.gate", "model.layers.*.block_sparse_moe.gate"},
    {"blocks.*.moe.experts.*.gate",
     "model.layers.*.block_sparse_moe.experts.*.w1"},
    {"blocks.*.moe.experts.*.down",
     "model.layers.*.block_sparse_moe.experts.*.w2"},
    {"blocks.*.moe.experts.*.up",
     "model.layers.*.block_sparse_moe.experts.*.w3"},
    {"final_norm", "model.norm"},
    {"head", "lm_head"},
};

std::span<const Name> names_of(const std::string& family) {
  return family == "gpt2" ? std::span<const Name>(kGpt2)
                          : std::span<const Name>(kLlama);
}

std::string with_numbers(std::string_view pattern,
                         const std::vector<std::string>& numbers) {
  std::string name;
  size_t next = 0;
  for (char letter : pattern) {
    if (letter != '*') {
      name += letter;
    } else if (next < numbers.size()) {
      name += numbers[next++];
    }
  }
  return name;
}

// Those between dots.
std::vector<std::string> numbers_in(const std::string& name) {
  std::vector<std::string> numbers;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');) {
    if (std::isdigit(static_cast<unsigned char>(part[0])) != 0) {
      numbers.push_back(part);
    }
  }
  return numbers;
}

}  // namespace

std::vector<int64_t> HuggingFaceSource::stored_shape(
    std::vector<int64_t> ours) const {
  ours[0] *= parts;
  if (transposed && ours.size() == 2) std::swap(ours[0], ours[1]);
  return ours;
}

mesh::Box HuggingFaceSource::stored_box(
    mesh::Box box, const std::vector<int64_t>& ours) const {
  box.offset[0] += part * ours[0];
  if (transposed && ours.size() == 2) {
    std::swap(box.offset[0], box.offset[1]);
    std::swap(box.size[0], box.size[1]);
  }
  return box;
}

at::Tensor HuggingFaceSource::turned(const at::Tensor& values) const {
  return transposed && values.dim() == 2 ? values.t() : values;
}

HuggingFaceSource hugging_face_source(const std::string& family,
                                      const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  const std::string block = parameter.substr(0, dot);
  const auto numbers = numbers_in(block);
  for (const Name& name : names_of(family)) {
    if (with_numbers(name.ours, numbers) != block) continue;
    return {with_numbers(name.theirs, numbers) + parameter.substr(dot),
            name.transposed, name.part, name.parts};
  }
  TORCH_INTERNAL_ASSERT(false, "no Hugging Face name for ", parameter);
}

std::string hugging_face_prefix(const std::string& family) {
  return family == "gpt2" ? "transformer." : "model.";
}

bool is_hugging_face_buffer(const std::string& tensor) {
  for (const std::string_view end :
       {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"}) {
    if (tensor.ends_with(end)) return true;
  }
  return false;
}

}  // namespace tessera::models
