#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;
using detail::Reader;
using detail::TensorName;

constexpr TensorName kNames[] = {
    {"embed.tokens", "transformer.wte"},
    {"embed.positions", "transformer.wpe"},
    {"blocks.*.attention_norm", "transformer.h.*.ln_1"},
    {"blocks.*.attention.q", "transformer.h.*.attn.c_attn", true, 0,
     detail::qkv_widths},
    {"blocks.*.attention.k", "transformer.h.*.attn.c_attn", true, 1,
     detail::qkv_widths},
    {"blocks.*.attention.v", "transformer.h.*.attn.c_attn", true, 2,
     detail::qkv_widths},
    {"blocks.*.attention.o", "transformer.h.*.attn.c_proj", true},
    {"blocks.*.mlp_norm", "transformer.h.*.ln_2"},
    {"blocks.*.mlp.up", "transformer.h.*.mlp.c_fc", true},
    {"blocks.*.mlp.down", "transformer.h.*.mlp.c_proj", true},
    {"final_norm", "transformer.ln_f"},
    {"head", "lm_head"},
};

void read(const Reader& in, ModelConfig& model) {
  model.layers = in.layers("n_layer");
  model.hidden = in.size("n_embd");
  model.heads = in.size("n_head");
  model.ffn = in.size("n_inner", 4 * model.hidden);
  model.max_seq = in.size("n_positions");
  model.norm_eps = in.number("layer_norm_epsilon", 1e-5, 0, 1);
  model.tie_embeddings = in.flag("tie_word_embeddings", true);
  const auto activation = in.word("activation_function", "gelu_new");
  in.refuse_unless(
      activation == "gelu_new" || activation == "gelu_pytorch_tanh",
      "activation_function");
  in.refuse_unless(in.flag("scale_attn_weights", true), "scale_attn_weights");
  for (const char* key :
       {"scale_attn_by_inverse_layer_idx", "add_cross_attention"}) {
    in.refuse_unless(!in.flag(key, false), key);
  }
}

Json write(const ModelConfig& model) {
  return {{"n_layer", model.layers},
          {"n_embd", model.hidden},
          {"n_head", model.heads},
          {"n_inner", model.ffn},
          {"n_positions", model.max_seq},
          {"n_ctx", model.max_seq},
          {"layer_norm_epsilon", model.norm_eps},
          {"activation_function", "gelu_new"},
          {"resid_pdrop", model.dropout},
          {"embd_pdrop", model.dropout},
          {"attn_pdrop", model.dropout}};
}

std::span<const TensorName> names() { return kNames; }

constexpr const char* kDropout[] = {"resid_pdrop", "embd_pdrop", "attn_pdrop"};

constexpr detail::HuggingFaceForm kForm = {names, "transformer.", read, write,
                                           kDropout};

}  // namespace

extern constinit const Family kGpt2 = {.name = "gpt2",
                                       .architecture = "GPT2LMHeadModel",
                                       .learned_positions = true,
                                       .norm = nn::NormKind::kLayerNorm,
                                       .mlp = nn::MlpKind::kGelu,
                                       .qkv_bias = true,
                                       .out_bias = true,
                                       .mlp_bias = true,
                                       .heads_fill_width = true,
                                       .hugging_face = &kForm};

}  // namespace tessera::models
